"""Detectors on four ranks of torch_xla with all that a training has, interrupted and resumed."""

import os

import pytest
from mmengine.config import Config
from mmengine.registry import DATASETS
from torch.utils.data import Dataset

from tests.jobs import largest_difference, trained_weights, weights_of
from tests.ranks import run_ranks
from tests.xla.executions import differences, train_counted
from tests.xla.loss_jobs import batch, trained_detector, two_stage_detector

pytestmark = pytest.mark.xla

RANKS = 4
ITERATIONS, SAVED = 8, 4
#: Of an iteration that accumulates gradients, and of one that updates weights, too. Each of the 4
#: and 8 synchronized layers adds two.
EXECUTIONS = dict(one_stage=(10, 11), two_stages=(20, 21))
#: Of one process for all chips, which synchronizes layers in the graph.
EXECUTIONS_OF_ONE = dict(one_stage=2, two_stages=4)


@DATASETS.register_module(force=True)
class Scenes(Dataset):
    """Pictures, each with as many boxes as asked for, or more."""

    metainfo = dict(classes=('a', 'b', 'c'))

    def __init__(self, least):
        self.least = least

    def __len__(self):
        return ITERATIONS * RANKS

    def __getitem__(self, index):
        pictures = batch(index, boxes=(self.least + index * 3 % 5, 0))
        return {name: values[0] for name, values in pictures.items()}


def detector(name):
    """A detector with synchronized layers, whose loss is the mean of the losses of ranks.

    To that end a sampler chooses without random numbers, and as many boxes of each picture.
    """
    from mmdet.models.task_modules import RandomSampler
    from mmdet.registry import TASK_UTILS

    @TASK_UTILS.register_module(force=True)
    class FirstSampler(RandomSampler):
        def random_choice(self, gallery, num):
            return gallery[:num]

    made = trained_detector('FCOSHead') if name == 'one_stage' else two_stage_detector()
    made['neck'].update(norm_cfg=dict(type='SyncBN'))
    if name == 'two_stages':
        made.train_cfg.rpn.assigner.neg_iou_thr = made.train_cfg.rpn.assigner.pos_iou_thr
        for stage in (made.train_cfg.rpn, made.train_cfg.rcnn):
            stage.sampler.type = 'FirstSampler'
    return made


def train(kind, name, work_dir, resumed=None):
    """Train with EMA, clipped gradients that accumulate, and checkpoints.

    Returns:
        dict: ``weights`` and ``ema`` at the end; ``executions`` and ``compilations`` of each
        iteration from the second on.
    """
    from mmdet.utils import register_all_modules

    from mmdevplug.runner import DeviceRunner

    register_all_modules(init_default_scope=False)
    ranks = int(os.environ.get('WORLD_SIZE', 1))
    cfg = dict(
        default_scope='mmdet',
        model=detector(name),
        accelerator=dict(type='xla', spmd=True) if kind == 'spmd' else dict(type=kind),
        train_dataloader=dict(
            # mmdet's RPN counts a positive anchor more in a picture without boxes.
            dataset=dict(type='mmengine.Scenes', least=int(name == 'two_stages')),
            batch_size=1 if kind == 'spmd' else RANKS // ranks,
            sampler=dict(type='InfiniteSampler', shuffle=False),
            num_workers=0,
            collate_fn=dict(type='pseudo_collate'),
        ),
        train_cfg=dict(by_epoch=False, max_iters=ITERATIONS),
        optim_wrapper=dict(
            optimizer=dict(type='SGD', lr=0.01, momentum=0.9),
            clip_grad=dict(max_norm=1.0),
            accumulative_counts=2,
        ),
        default_hooks=dict(
            logger=dict(type='LoggerHook', interval=100),
            checkpoint=dict(type='SafeCheckpointHook', interval=SAVED, by_epoch=False),
        ),
        custom_hooks=[dict(type='EMAHook', ema_type='ExponentialMovingAverage', momentum=0.1)],
        randomness=dict(seed=0),
        work_dir=str(work_dir),
        launcher='pytorch' if ranks > 1 else 'none',
        load_from=resumed,
        resume=resumed is not None,
        log_level='WARNING',
    )
    runner = DeviceRunner.from_cfg(Config(cfg))
    executions, compilations = zip(*train_counted(runner))
    (ema,) = [hook.ema_model for hook in runner.hooks if hasattr(hook, 'ema_model')]
    return dict(
        weights=trained_weights(runner),
        ema=weights_of(ema),
        executions=differences(executions),
        compilations=differences(compilations),
    )


def train_whole_and_again(kind, ranks, name, folder):
    """Train alone on the CPU, in a job, and in one that goes on from the other's file.

    Yields executions and compilations of each rank, after two updates and without the last
    iteration, which saves.
    """
    environ = dict(CPU_NUM_DEVICES=str(RANKS))
    (alone,) = run_ranks(train, 0, 'cpu', name, folder / 'alone')
    whole = run_ranks(train, ranks, kind, name, folder / 'whole', environ=environ)
    saved = str(folder / 'whole' / f'iter_{SAVED}.pth')
    again = run_ranks(train, ranks, kind, name, folder / 'again', saved, environ=environ)
    for expected, found in zip(whole, again):
        for state in ('weights', 'ema'):
            assert largest_difference(expected[state], found[state]) == 0
            assert largest_difference(expected[state], alone[state]) <= 1e-5
        yield [expected[key][3:-1] for key in ('executions', 'compilations')]


@pytest.mark.operators
@pytest.mark.parametrize('name', list(EXECUTIONS))
def test_all_at_once(tmp_path, name):
    accumulating, updating = EXECUTIONS[name]
    for found in train_whole_and_again('xla', RANKS, name, tmp_path):
        assert found == [[accumulating, updating, accumulating], [0, 0, 0]]


@pytest.mark.operators
@pytest.mark.parametrize('name', list(EXECUTIONS))
def test_one_process_for_all_chips(tmp_path, name):
    ((executions, compilations),) = train_whole_and_again('spmd', 0, name, tmp_path)
    assert executions == [EXECUTIONS_OF_ONE[name]] * 3
    assert compilations[1:] == [0, 0]  # the first follows the file, whose averages are new inputs
