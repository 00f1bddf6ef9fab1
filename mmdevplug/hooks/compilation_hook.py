"""Count the graphs that a lazy device compiles, and warn if that does not end."""

from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from mmdevplug.accelerators import context_of
from mmdevplug.utils.annotations import AnyRunner

#: Iterations in which graphs may be compiled.
WARM_UP = 20
#: Later ones that may compile, such as the last, smaller batch of an epoch, before the warning.
PATIENCE = 3


@HOOKS.register_module()
class CompilationHook(Hook):
    """Log ``device/compiles``, the number of graphs that this process has compiled so far.

    One warning says that iterations after the warm-up still compile. None of this runs anything on
    the device. On devices that are not lazy the hook does nothing.
    """

    # After DeviceHook, which runs what the iteration has recorded.
    priority = 'VERY_HIGH'

    def before_train(self, runner: AnyRunner) -> None:
        """Begin to count."""
        self._compilation = context_of(runner).accelerator.compilation
        self._count = self._compilation.count()
        self._done = self._late = 0

    def after_val(self, runner: AnyRunner) -> None:
        """Leave out what validation compiled, which has other graphs."""
        self._count = context_of(runner).accelerator.compilation.count()

    def after_train_iter(self, runner: AnyRunner, *args: object, **kwargs: object) -> None:
        """Count and log compilations, and warn of those after the warm-up."""
        self._done += 1
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
