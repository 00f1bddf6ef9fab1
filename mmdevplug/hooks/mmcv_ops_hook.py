"""Log what mmcv's operators cost where they run on the host."""

from typing import Any, Optional, Union

from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from mmdevplug.patches.mmcv_ops.patch import host_use
from mmdevplug.patches.mmcv_ops.stats import describe_uses


@HOOKS.register_module()
class MMCVOpsHook(Hook):
    """Log which operators of mmcv ran on the host, how often, and what they moved.

    Nothing is logged where all of them have a kernel.

    Args:
        interval (int): Iterations of training between two tables; there is one at the end of
            training, validation and testing too. Defaults to 1000.
    """

    priority = 'LOW'

    def __init__(self, interval: int = 1000) -> None:
        self.interval = interval
        self._told = 0

    def after_train_iter(
        self,
        runner: Any,
        batch_idx: int,
        data_batch: Optional[Union[dict, tuple, list]] = None,
        outputs: Optional[dict] = None,
    ) -> None:
        """Log at intervals; see :meth:`mmengine.hooks.Hook.after_train_iter`."""
        if self.every_n_train_iters(runner, self.interval):
            self._tell(runner)

    def after_train(self, runner: Any) -> None:
        """Log at the end of training."""
        self._tell(runner)

    def after_val(self, runner: Any) -> None:
        """Log at the end of validation."""
        self._tell(runner)

    def after_test(self, runner: Any) -> None:
        """Log at the end of testing."""
        self._tell(runner)

    def _tell(self, runner: Any) -> None:
        uses = host_use()
        calls = sum(use.calls for use in uses.values())
        if calls != self._told:
            self._told = calls
            runner.logger.info(
                f'Operators of mmcv that ran on the host so far, on rank {runner.rank}:\n'
                f'{describe_uses(uses)}'
            )
