"""Publish what this rank does, so that other ranks can report it if this one is late."""

from typing import Dict, Optional

from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from mmdevplug.data.same_samples import Stream, compare_data, stream_of
from mmdevplug.distributed.waiting import wait_for_everyone
from mmdevplug.fault_tolerance.failure import enter_phase
from mmdevplug.gradients.unused_parameters import refuse_unreduced
from mmdevplug.patches.metric_results import patch_video_metrics
from mmdevplug.utils.annotations import AnyRunner


@HOOKS.register_module()
class PhaseHook(Hook):
    """Enter a phase at each step, and wait for all ranks after the slow ones.

    Ranks wait for each other when the data is prepared and after the first iteration, in which
    devices compile; no other iteration costs a message.
    """

    priority = 'VERY_HIGH'

    def __init__(self) -> None:
        self._evaluated: Optional[Stream] = None

    def before_run(self, runner: AnyRunner) -> None:
        """Wait for the data of all ranks and compare it; prepare metrics to gather results."""
        compare_data(runner)
        patch_video_metrics()
        enter_phase('preparing the model')

    def before_train(self, runner: AnyRunner) -> None:
        """Note that the first iteration comes next."""
        self._begun, self._stream = 0, stream_of(runner.train_loop, 'train')

    def before_val(self, runner: AnyRunner) -> None:
        """Note that the first batch comes next."""
        self._evaluated = stream_of(runner.val_loop, 'val')

    def after_val_epoch(self, runner: AnyRunner, metrics: Optional[Dict] = None) -> None:
        """Say if ranks have read the same samples."""
        if self._evaluated is not None:
            self._evaluated.compare('end of validation')

    after_test_epoch = after_val_epoch

    def before_train_epoch(self, runner: AnyRunner) -> None:
        """Note that data is being loaded."""
        enter_phase(f'train: loading the data of iteration {runner.iter + 1}')

    def _before_iter(
        self, runner: AnyRunner, batch_idx: int, data_batch: object = None, mode: str = 'train'
    ) -> None:
        number = runner.iter if mode == 'train' else batch_idx
        enter_phase(f'{mode}: iteration {number + 1}')

    def _after_iter(
        self,
        runner: AnyRunner,
        batch_idx: int,
        data_batch: object = None,
        outputs: object = None,
        mode: str = 'train',
    ) -> None:
        if mode != 'train':
            enter_phase(f'{mode}: after iteration {batch_idx + 1}')
            if self._evaluated is not None:
                self._evaluated.note(batch_idx, data_batch)
            return
        refuse_unreduced(runner.model)  # before this rank waits for those that wait for it
        if self._begun < 2:
            if self._stream is not None:
                self._stream.note(self._begun, data_batch)
            if self._begun == 0:
                wait = wait_for_everyone if self._stream is None else self._stream.compare
                wait('first iteration')
            self._begun += 1
        enter_phase(f'train: after iteration {runner.iter + 1}, or loading the next data')

    def after_train(self, runner: AnyRunner) -> None:
        """Note that this rank has left the loop."""
        enter_phase('train: after the last iteration')
