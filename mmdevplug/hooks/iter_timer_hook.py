"""Time iterations, the work of the device included."""

from mmengine.hooks import IterTimerHook, LoggerHook
from mmengine.registry import HOOKS

from mmdevplug.accelerators import context_of
from mmdevplug.utils.annotations import AnyRunner
from mmdevplug.utils.loops import loader_of


@HOOKS.register_module()
class DeviceIterTimerHook(IterTimerHook):
    """MMEngine's ``IterTimerHook``, which waits for the device before a time is written.

    The host only queues work, and MMEngine's hook times that. Here the last iteration before each
    log line, and the last one of an epoch, ends when the device has finished its work. So the
    averages in the log are right, and the device does not wait for the host in other iterations.
    :class:`mmdevplug.DeviceRunner` uses it instead of MMEngine's.
    """

    lost = 'times in the log are those of queueing work, not of the device'

    def _after_iter(
        self,
        runner: AnyRunner,
        batch_idx: int,
        data_batch: object = None,
        outputs: object = None,
        mode: str = 'train',
    ) -> None:
        loader = loader_of(getattr(runner, f'{mode}_loop'))
        due = self.end_of_epoch(loader, batch_idx)
        for hook in runner.hooks:
            if isinstance(hook, LoggerHook):
                due = due or hook.every_n_inner_iters(batch_idx, hook.interval)
        if due:
            context = context_of(runner)
            for device in context.devices:
                context.accelerator.synchronize(device)
        super()._after_iter(runner, batch_idx, data_batch, outputs, mode)
