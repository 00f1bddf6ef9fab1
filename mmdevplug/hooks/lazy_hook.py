"""Run what a lazy device has recorded at the end of each training iteration."""

from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from mmdevplug.accelerators import context_of
from mmdevplug.optim.device_optim_wrapper import log_norms
from mmdevplug.utils.annotations import AnyRunner


@HOOKS.register_module()
class LazyHook(Hook):
    """Materialize after every training iteration; registered on lazy devices alone.

    It runs before the hooks that read losses, because reading a value that is not materialized
    yet costs one more execution.
    """

    priority = 'HIGHEST'

    def before_train(self, runner: AnyRunner) -> None:
        """Let optimizer wrappers log gradient norms only at the end of an iteration."""
        log_norms(runner.optim_wrapper)

    def after_train_iter(self, runner: AnyRunner, *args: object, **kwargs: object) -> None:
        """Materialize, also after an iteration that only accumulated gradients."""
        # Our wrappers do so at the end of their `train_step`, which a user's loop need not call.
        if getattr(runner.model, 'step_materialized', False):
            runner.model.step_materialized = False
        else:
            context_of(runner).materialize()
        log_norms(runner.optim_wrapper)
