"""Loops and data of which nothing is known but that they can be run."""

import pytest
import torch
from mmengine.registry import DATASETS, LOOPS, RUNNERS
from mmengine.runner import BaseLoop
from torch.utils.data import IterableDataset

from mmdevplug.checkpoint.participants import unpack
from tests.jobs import (
    digits_config,
    install_card,
    load_file,
    log_of,
    needs_later_loops,
    weights_of,
)
from tests.ranks import check_errors, errors_of_ranks, run_ranks


@LOOPS.register_module()
class SeveralSets(BaseLoop):
    """Has the attributes of mmagic's ``MultiValLoop``: no ``dataloader`` until it has run."""

    def __init__(self, runner, dataloader, evaluator):
        self._runner = runner
        self.dataloaders = [runner.build_dataloader(each, seed=runner.seed) for each in dataloader]
        self.evaluators = [runner.build_evaluator(each) for each in evaluator]

    def run(self):
        self.runner.call_hook('before_val')
        self.runner.call_hook('before_val_epoch')
        self.runner.model.eval()
        metrics = {}
        for loader, evaluator in zip(self.dataloaders, self.evaluators):
            self.dataloader, self.evaluator = loader, evaluator
            for idx, batch in enumerate(self.dataloader):
                self.runner.call_hook('before_val_iter', batch_idx=idx, data_batch=batch)
                with torch.no_grad():
                    outputs = self.runner.model.val_step(batch)
                self.evaluator.process(outputs, batch)
                kept = [result for each in self.evaluators for result in each.metrics[0].results]
                self.runner.call_hook(
                    'after_val_iter', batch_idx=idx, data_batch=batch, outputs=outputs
                )
            assert kept
            metrics.update(self.evaluator.evaluate(len(self.dataloader.dataset)))
        self.runner.call_hook('after_val_epoch', metrics=metrics)
        self.runner.call_hook('after_val')
        return metrics


def four_iterations(accelerator, work_dir, load_from=None, **options):
    """A config that saves after two iterations, and goes on from a checkpoint."""
    install_card(accelerator)
    return digits_config(
        accelerator,
        work_dir,
        train_cfg=dict(_delete_=True, by_epoch=False, max_iters=4, val_interval=2),
        default_hooks__checkpoint__interval=2,
        default_hooks__checkpoint__by_epoch=False,
        default_hooks__checkpoint__max_keep_ckpts=-1,
        load_from=load_from,
        resume=load_from is not None,
        **options,
    )


def validate_on_two_sets(accelerator, work_dir, load_from=None):
    options = dict(val_cfg=dict(type='SeveralSets'), param_scheduler=None)
    cfg = four_iterations(accelerator, work_dir, load_from, **options)
    sets = [dict(cfg.val_dataloader, dataset=dict(type='DigitsDataset', split='test'))]
    sets.append(dict(sets[0], batch_size=30))
    cfg.val_dataloader = sets
    cfg.val_evaluator = [dict(type='DigitsAccuracy', prefix=name) for name in 'ab']
    runner = RUNNERS.build(cfg)
    runner.train()
    scalars = runner.message_hub.log_scalars
    found = [scalars[f'val/{name}/accuracy'].current() for name in 'ab']
    return weights_of(runner.model), found


@pytest.mark.parametrize('accelerator', ['cpu', 'zeta'])
def test_validation_of_several_sets_is_saved_and_resumed(tmp_path, accelerator):
    whole = run_ranks(validate_on_two_sets, 2, accelerator, tmp_path / 'whole')
    half = str(tmp_path / 'whole' / 'iter_2.pth')
    resumed = run_ranks(validate_on_two_sets, 2, accelerator, tmp_path, half)
    for (weights, (first, second)), (again, metrics) in zip(whole, resumed):
        assert first == second > 0  # the same images, in other batches
        assert metrics == [first, second]
        assert all((again[name] == weights[name]).all() for name in weights)
    (first, _) = load_file(tmp_path / 'iter_4.pth')['mmdevplug']['ranks']
    states = unpack(first, 'iter_4.pth')
    for name in ('train_loader', 'val_loader', 'val_loader/2'):
        assert states[name]['passes'] == 1


@DATASETS.register_module()
class Stream(IterableDataset):
    """Images in a row: ``length`` of them, or without an end; it does not know its place."""

    metainfo = dict(classes=tuple('0123456789'))

    def __init__(self, length=None):
        self.images, self.length, self.at = DATASETS.build(dict(type='DigitsDataset')), length, 0

    def __iter__(self):
        begun = self.at
        while self.length is None or self.at - begun < self.length:
            self.at += 1
            yield self.images[self.at % len(self.images)]


def train_on_stream(work_dir, dataset, load_from=None, options=()):
    cfg = four_iterations(
        'cpu',
        work_dir,
        load_from,
        train_dataloader__sampler=None,
        train_dataloader__dataset=dict(_delete_=True, **dataset),
        param_scheduler=dict(_delete_=True, type='LinearLR', by_epoch=False, end=4),
        default_hooks__logger=dict(type='LoggerHook', interval=1),
        **dict(options),
    )
    runner = RUNNERS.build(cfg)
    runner.train()
    return weights_of(runner.model)


@needs_later_loops
@pytest.mark.parametrize('length', [None, 64])
def test_a_stream_trains_by_iterations_and_resumes(tmp_path, length):
    """One that knows its place is in ``checkpoint/test_stateful_data.py``."""
    stream, half = dict(type='Stream', length=length), str(tmp_path / 'whole' / 'iter_2.pth')
    (whole,) = run_ranks(train_on_stream, 1, tmp_path / 'whole', stream)
    (again,) = run_ranks(train_on_stream, 1, tmp_path, stream, half)
    assert all((again[name] == whole[name]).all() for name in whole)
    log = log_of(tmp_path / 'whole')
    assert all(f'[{number}/4]' in log for number in (1, 2, 3, 4))


def test_validation_needs_a_length(tmp_path):
    options = dict(
        val_dataloader__sampler=None,
        val_dataloader__dataset=dict(_delete_=True, type='Stream', length=64),
    )
    errors = errors_of_ranks(train_on_stream, 1, tmp_path, dict(type='Stream'), None, options)
    check_errors(errors, 'SampleError', 'val_dataloader: Stream has no length')
