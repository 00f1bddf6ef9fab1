"""Log what mmcv's operators cost where they run on the host."""

from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from mmdevplug.patches.mmcv_ops.patch import host_use
from mmdevplug.patches.mmcv_ops.stats import describe_uses
from mmdevplug.utils.annotations import AnyRunner


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
        self._logged = 0

    def after_train_iter(self, runner: AnyRunner, *args: object, **kwargs: object) -> None:
        """Log at intervals."""
        if self.every_n_train_iters(runner, self.interval):
            self.after_train(runner)

    def after_train(self, runner: AnyRunner) -> None:
        """Log unless no operator was called since the last table."""
        uses = host_use()
        calls = sum(use.calls for use in uses.values())
        if calls != self._logged:
            self._logged = calls
            runner.logger.info(
                f'Operators of mmcv that ran on the host so far, on rank {runner.rank}:\n'
                f'{describe_uses(uses)}'
            )

    after_val = after_test = after_train
