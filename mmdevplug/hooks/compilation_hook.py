"""Count the graphs that a lazy device compiles, and warn if that does not end."""

from typing import Optional

from mmengine.hooks import Hook, LoggerHook
from mmengine.registry import HOOKS

from mmdevplug.accelerators import rank_device
from mmdevplug.utils.annotations import AnyRunner
from mmdevplug.utils.progress import SilenceWatch

#: Iterations in which graphs may be compiled.
WARM_UP = 20
#: Later ones that may compile, such as the last, smaller batch of an epoch, before the warning.
PATIENCE = 3


@HOOKS.register_module()
class CompilationHook(Hook):
    """Log ``device/compiles``, the number of graphs that this process has compiled so far.

    One warning says that iterations after the warm-up still compile. A line every 30 s says what
    goes on until the first line of the log, and whenever an iteration takes longer than that. None
    of this runs anything on the device. On devices that are not lazy the hook does nothing.
    """

    # After DeviceHook, which runs what the iteration has recorded.
    priority = 'VERY_HIGH'

    def __init__(self) -> None:
        self._silence: Optional[SilenceWatch] = None

    def before_train(self, runner: AnyRunner) -> None:
        """Begin to count."""
        self._compilation = rank_device()[0].compilation
        self._count = self._compilation.count()
        self._done = self._late = 0
        #: Iterations until the first line of the log: each may be quick, and all together long.
        self._first_line = min(
            [hook.interval for hook in runner.hooks if isinstance(hook, LoggerHook)], default=1
        )
        if self._compilation.lazy:
            self._silence = SilenceWatch(lambda seconds: self._describe_silence(runner, seconds))

    def after_val(self, runner: AnyRunner) -> None:
        """Leave out what validation compiled, which has other graphs."""
        self._count = rank_device()[0].compilation.count()

    def after_train_iter(self, runner: AnyRunner, *args: object, **kwargs: object) -> None:
        """Count and log compilations, and warn of those after the warm-up."""
        self._done += 1
        if self._silence is not None and self._done >= self._first_line:
            self._silence.restart()
        before, self._count = self._count, self._compilation.count()
        if self._count is None:
            return
        runner.message_hub.update_scalars({'train/device/compiles': self._count}, resumed=False)
        if self._done > WARM_UP and self._count > (before or 0):
            self._late += 1
            if self._late == PATIENCE:
                runner.logger.warning(
                    f'Graphs are compiled after {WARM_UP} iterations of warm-up, too: in '
                    f'{PATIENCE} of {self._done - WARM_UP} iterations, {self._count} graphs so '
                    f'far. Compiling takes far longer than computing. Each new shape of a batch '
                    f'is a new graph: accelerator=dict(pad_to=...) pads images to few sizes; '
                    f'docs/en/shapes.md says what else changes a graph.'
                )

    def _describe_silence(self, runner: AnyRunner, seconds: float) -> str:
        count = self._compilation.count()
        graphs = '' if count is None else f'; {count} graphs have been compiled so far'
        return (
            f'Iteration {runner.iter + 1} is running, {self._done} are done, and this is the '
            f'first line for {seconds:.0f} s{graphs}. A lazy device compiles a graph when it is '
            f'first needed, which takes far longer than running it.'
        )

    def close_silence_watch(self) -> None:
        """End the lines; also called where an error ends the training."""
        if self._silence is not None:
            self._silence.close()
            self._silence = None

    def after_train(self, runner: AnyRunner) -> None:
        """End the lines."""
        self.close_silence_watch()
