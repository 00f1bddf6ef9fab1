"""The loop that draws samples until enough are valid: it trains, resumes, and has an example."""

import pytest
import torch
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.registry import FUNCTIONS, HOOKS, MODELS, RUNNERS

from mmdevplug.config.dynamic_sampling import DynamicSamplingOptions, SamplerOptions
from mmdevplug.runner.dynamic_sampling_loop import DynamicSamplingTrainLoop
from mmdevplug.samples import stack_samples
from tests.checkpoint.training import NoisyModel, train
from tests.columns import job_of
from tests.jobs import ROOT, largest_difference
from tests.ranks import RanksFailed, run_ranks


@MODELS.register_module(force=True)
class SamplingModel(NoisyModel):
    """Makes noisy samples of a batch, of which about half are valid."""

    def generate_samples(self, data):
        assert not self.training
        assert not torch.is_grad_enabled()
        inputs = data['inputs'] + 0.1 * torch.randn_like(data['inputs'])
        chances = torch.rand(len(inputs), device=inputs.device)
        return [
            dict(inputs=x, targets=y, chance=chance, tokens=[7] * int(1 + 9 * chance))
            for x, y, chance in zip(inputs, data['targets'], chances)
        ]

    def is_valid_group(self, sample):
        return sample['chance'] > 0.5

    def never(self, sample):
        return False

    def forward(self, inputs, targets=None, chance=None, tokens=None, mode='tensor'):
        assert mode != 'loss' or self.training
        if mode == 'loss':
            assert [len(each) for each in tokens] == [int(1 + 9 * c) for c in chance.tolist()]
        return super().forward(inputs, targets, mode)


@FUNCTIONS.register_module(force=True)
def stack_but_tokens(samples, note):
    assert note == 'of the config'
    tokens = [sample.pop('tokens') for sample in samples]
    return dict(stack_samples(samples, 'cpu'), tokens=tokens)


#: A batch that a function of the config makes.
COLLATED = dict(sampler=dict(collate=dict(type='stack_but_tokens', note='of the config')))


@HOOKS.register_module(force=True)
class Surplus(Hook):
    """Notes how each pool was filled."""

    found = []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        loop = runner.train_loop
        assert len(data_batch['inputs']) * runner.world_size == loop.sampler.last.samples
        assert data_batch['inputs'].device == next(runner.model.parameters()).device
        self.found.append((loop.batches_drawn, loop.sampler.last.surplus))


def train_sampling(work_dir, options):
    """Train with the loop.

    Returns:
        dict: What :func:`train` returns, and for each iteration the batches drawn and the surplus.
    """
    import time

    time.sleep = lambda seconds, sleep=time.sleep: sleep(min(seconds, 0.1))  # between two passes
    options = dict(options)
    loop = dict(type='DynamicSamplingTrainLoop', max_iters=12, val_interval=4, target=8)
    loop.update(options.pop('loop', {}))
    hooks = [
        dict(type='EMAHook', momentum=0.1),
        dict(type='Surplus'),
        *options.pop('hooks', []),
    ]
    defaults = dict(
        by_epoch=False,
        model=dict(type='SamplingModel'),
        custom_hooks=hooks,
        train_cfg=loop,
        checkpoint=dict(interval=4, by_epoch=False),
    )
    Surplus.found.clear()
    result = train(work_dir, **dict(defaults, **options))
    return dict(result, pools=list(Surplus.found))


def interrupted(world_size, work_dir, die_at, options, resumed_on=None):
    dies = dict(options, hooks=[dict(type='DieAt', iteration=die_at, rank=max(0, world_size - 1))])
    job = job_of(options.get('accelerator', 'cpu'), world_size)
    with pytest.raises(RanksFailed):
        run_ranks(train_sampling, world_size, work_dir, dies, **job)
    ranks = world_size if resumed_on is None else resumed_on
    return run_ranks(train_sampling, ranks, work_dir, dict(options, resume=True), **job)


@pytest.mark.parametrize('accelerator', ['cpu', 'zeta'])
def test_pools_are_trained_on(tmp_path, accelerator):
    first, second = run_ranks(train_sampling, 2, tmp_path, dict(accelerator=accelerator))
    assert first['iter'] == second['iter'] == 12
    drawn = [batches for batches, _ in first['pools']]
    assert drawn == [batches for batches, _ in second['pools']]
    assert drawn[-1] > 12  # batches of 4, of which about half are valid
    weights = [
        {name: w for name, w in found['weights'].items() if 'running' not in name}
        for found in (first, second)
    ]
    assert largest_difference(*weights) == 0.0


@pytest.mark.parametrize(
    ('world_size', 'changes'),
    [
        # One batch of data suffices for several pools: the first one after resuming draws none.
        (2, dict(train_dataloader__batch_size=24)),
        # Passes over the data, shuffled by the generator that the model uses too.
        (0, dict(train_dataloader__sampler=dict(type='GlobalRandomSampler'))),
        (0, dict(train_dataloader__num_workers=2, loop=COLLATED)),
        (2, dict(accelerator='zeta')),
        pytest.param(2, dict(accelerator='cuda'), marks=pytest.mark.cuda),
    ],
)
def test_an_interrupted_run_ends_with_the_same_bits(tmp_path, world_size, changes):
    job = job_of(changes.get('accelerator', 'cpu'), world_size)
    expected = run_ranks(train_sampling, world_size, tmp_path / 'whole', changes, **job)
    found = interrupted(world_size, tmp_path / 'killed', 7, changes)
    for mine, theirs in zip(expected, found):
        assert mine['pools'][4:] == theirs['pools']
        assert largest_difference(mine['weights'], theirs['weights']) == 0.0
        assert largest_difference(mine['ema'], theirs['ema']) == 0.0
        assert mine['draws'] == theirs['draws']
    assert any(surplus for _, surplus in expected[0]['pools'])


def test_on_fewer_ranks_the_surplus_goes_on(tmp_path):
    options = dict(train_dataloader__batch_size=24, checkpoint=dict(interval=1, by_epoch=False))
    (found,) = interrupted(2, tmp_path, 2, options, resumed_on=1)
    # From one batch of each rank there is enough for the next pool.
    assert found['pools'][0][0] == 2
    assert found['iter'] == 12


def test_mmengines_own_checkpoints_lose_the_place(tmp_path):
    (found,) = run_ranks(resume_from_mmengines, 0, tmp_path)
    assert found['iter'] == 12
    assert len(found['lines']) == 1
    assert 'Resuming at iteration 6, but not exactly' in found['lines'][0]


def resume_from_mmengines(work_dir):
    from mmdevplug.runner import dynamic_sampling_loop

    lines = []
    dynamic_sampling_loop.log_warning = lines.append
    hook = dict(type='CheckpointHook', interval=6, by_epoch=False)
    plain = dict(accelerator__safe_checkpoints=False, default_hooks__checkpoint=hook)
    train_sampling(work_dir, dict(plain, loop=dict(max_iters=6)))
    return dict(train_sampling(work_dir, dict(plain, resume=True)), lines=lines)


def test_no_options_of_the_sampler_are_its_defaults():
    found = DynamicSamplingOptions.from_dict(dict(target=4, sampler=None))
    assert found.sampler == SamplerOptions()


def test_options_need_their_names():
    with pytest.raises(TypeError, match='positional'):
        DynamicSamplingTrainLoop(None, [], 10, 64)


# bad configs -----------------------------------------------------------------------------------


def errors_of(options):
    with pytest.raises(RanksFailed) as raised:
        run_ranks(train_sampling, 0, options.pop('work_dir'), options)
    return raised.value.errors[0][:2]


@pytest.mark.parametrize(
    ('options', 'kind', 'told'),
    [
        (dict(loop=dict(generate='draw')), 'ModelError', "train_cfg.generate='draw'"),
        (dict(loop=dict(is_valid='inputs')), 'ModelError', 'SamplingModel has no such method'),
        (dict(loop=dict(target=7, per_group=2)), 'SampleError', 'target=7 is no multiple'),
        (dict(loop=dict(maxresamples=3)), 'SampleError', "did you mean 'max_resamples'?"),
        (
            dict(loop=dict(sampler=dict(log=1))),
            'SampleError',
            "train_cfg.sampler has no option 'log'",
        ),
        (
            dict(loop=dict(sampler=dict(collate='pad'))),
            'SampleError',
            "(train_cfg.sampler.collate): expected None, 'stack', 'list', a function",
        ),
        (dict(loop=dict(target=99, max_resamples=1)), 'SampleError', 'of target=99 samples'),
        (
            dict(loop=dict(is_valid='never', max_resamples=1, on_short='fewer')),
            'SampleError',
            'for iteration 1 not even one valid group for each rank',
        ),
    ],
)
def test_errors(tmp_path, options, kind, told):
    found, message = errors_of(dict(options, work_dir=tmp_path))
    assert found == kind
    assert told in message


# the worked example ----------------------------------------------------------------------------


def example_config(name, work_dir, **changes):
    cfg = Config.fromfile(str(ROOT / 'configs' / 'dynamic_sampling' / f'{name}.py'))
    cfg.merge_from_dict({key.replace('__', '.'): value for key, value in changes.items()})
    cfg.work_dir = str(work_dir)
    import os

    cfg.launcher = 'pytorch' if 'RANK' in os.environ else 'none'
    return cfg


def train_example(name, work_dir, changes):
    runner = RUNNERS.build(example_config(name, work_dir, **changes))
    runner.train()
    scalars = runner.message_hub.log_scalars
    return dict(
        accuracy=float(scalars['val/accuracy'].current()),
        device=str(next(runner.model.parameters()).device),
        resamples=sum(scalars['train/sampling/resamples'].data[0]),
        report=runner.train_loop.sampler.last,
    )


def test_the_example_learns(tmp_path):
    for found in run_ranks(train_example, 2, 'dynamic_sampling_cpu', tmp_path, {}):
        assert found['accuracy'] >= 97.0
        assert found['resamples'] >= 20
