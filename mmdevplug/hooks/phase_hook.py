"""Publish what this rank does, so that other ranks can say it if this one is late."""

from typing import Any, Optional, Sequence, Union

from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from mmdevplug.data.checking import compare_batches
from mmdevplug.distributed.waiting import wait_for_everyone
from mmdevplug.fault_tolerance.failure import enter_phase

DATA_BATCH = Optional[Union[dict, tuple, list]]


@HOOKS.register_module()
class PhaseHook(Hook):
    """Enters a phase at each step, and waits for all ranks after the slow ones.

    Ranks wait for each other when the data is prepared and after the first iteration, in which
    devices compile; no other iteration costs a message.

    Examples:
        >>> custom_hooks = [dict(type='PhaseHook')]
    """

    priority = 'VERY_HIGH'

    def __init__(self) -> None:
        self._first = True

    def before_run(self, runner: Any) -> None:
        """Wait for the data of all ranks and compare it; see :class:`mmengine.hooks.Hook`."""
        compare_batches(runner._train_loop, 'train_dataloader', 'data preparation')
        enter_phase('preparing the model')

    def before_train(self, runner: Any) -> None:
        """Note the first iteration; see :class:`mmengine.hooks.Hook`."""
        self._first = True

    def before_train_epoch(self, runner: Any) -> None:
        """Note that data is being loaded; see :class:`mmengine.hooks.Hook`."""
        enter_phase(f'train: loading the data of iteration {runner.iter + 1}')

    def before_train_iter(
        self, runner: Any, batch_idx: int, data_batch: DATA_BATCH = None
    ) -> None:
        """Note the iteration; see :class:`mmengine.hooks.Hook`."""
        enter_phase(f'train: iteration {runner.iter + 1}')

    def after_train_iter(
        self,
        runner: Any,
        batch_idx: int,
        data_batch: DATA_BATCH = None,
        outputs: Optional[dict] = None,
    ) -> None:
        """Wait for the first iteration of all ranks; see :class:`mmengine.hooks.Hook`."""
        if self._first:
            self._first = False
            wait_for_everyone('first iteration')
        enter_phase(f'train: after iteration {runner.iter + 1}, or loading the next data')

    def before_val_iter(self, runner: Any, batch_idx: int, data_batch: DATA_BATCH = None) -> None:
        """Note the iteration; see :class:`mmengine.hooks.Hook`."""
        enter_phase(f'val: iteration {batch_idx + 1}')

    def after_val_iter(
        self,
        runner: Any,
        batch_idx: int,
        data_batch: DATA_BATCH = None,
        outputs: Optional[Sequence] = None,
    ) -> None:
        """Note that it is over; see :class:`mmengine.hooks.Hook`."""
        enter_phase(f'val: after iteration {batch_idx + 1}')

    def before_test_iter(self, runner: Any, batch_idx: int, data_batch: DATA_BATCH = None) -> None:
        """Note the iteration; see :class:`mmengine.hooks.Hook`."""
        enter_phase(f'test: iteration {batch_idx + 1}')

    def after_test_iter(
        self,
        runner: Any,
        batch_idx: int,
        data_batch: DATA_BATCH = None,
        outputs: Optional[Sequence] = None,
    ) -> None:
        """Note that it is over; see :class:`mmengine.hooks.Hook`."""
        enter_phase(f'test: after iteration {batch_idx + 1}')
