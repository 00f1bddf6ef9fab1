"""Run what a lazy device has recorded at the end of each training iteration."""

from typing import Any

from mmengine.hooks import Hook
from mmengine.model import BaseAveragedModel
from mmengine.registry import HOOKS
from torch import nn

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
        """Let gradient norms be logged at the end of an iteration, and averages own memory."""
        log_norms(runner.optim_wrapper)
        models = [getattr(hook, 'ema_model', None) for hook in runner.hooks]
        for model in [runner.model, *models]:
            for part in model.modules() if isinstance(model, nn.Module) else ():
                if isinstance(part, BaseAveragedModel):
                    keep_own_memory(part)

    def after_train_iter(self, runner: AnyRunner, *args: object, **kwargs: object) -> None:
        """Materialize, also after an iteration that only accumulated gradients."""
        # Our wrappers do so at the end of their `train_step`, which a user's loop need not call.
        if getattr(runner.model, 'step_materialized', False):
            runner.model.step_materialized = False
        else:
            context_of(runner).materialize()
        log_norms(runner.optim_wrapper)


def keep_own_memory(average: Any) -> None:
    """Let averaged weights share no memory with weights that an iteration does not change.

    The first update copies the weights. On torch_xla 2.9 a copy shares the buffer, and the next
    update would give the buffer away, with the weights that are frozen or still accumulate.
    """

    def update_parameters(model: nn.Module) -> None:
        del vars(average)['update_parameters']  # the first alone
        average.update_parameters(model)
        for weight in average.avg_parameters.values():
            weight.data.copy_(weight.data * 1)

    vars(average)['update_parameters'] = update_parameters
