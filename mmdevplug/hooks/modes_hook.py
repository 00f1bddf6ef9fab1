"""Keep a model in training mode inside an epoch."""

from typing import List, Tuple

from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from torch import nn

from mmdevplug.device_guard.stack_location import user_frame
from mmdevplug.utils.annotations import AnyRunner
from mmdevplug.utils.model import unwrap_model


@HOOKS.register_module()
class ModesHook(Hook):
    """Return to training mode, with a warning, after a validation that a hook runs in an epoch."""

    priority = 'HIGHEST'

    def __init__(self) -> None:
        self._modes: List[Tuple[nn.Module, bool]] = []
        self._warned_of_eval, self._validated_at = False, ''

    def before_train_epoch(self, runner: AnyRunner) -> None:
        """Forget the modes of the last epoch."""
        self._modes, self._validated_at = [], ''

    def before_train_iter(self, runner: AnyRunner, *args: object, **kwargs: object) -> None:
        """Return to training mode if a validation inside the epoch has left the model in eval."""
        if self._modes and not unwrap_model(runner.model).training:
            # Not `train()`: parts may be kept in eval mode on purpose.
            for module, training in self._modes:
                module.training = training
            if not self._warned_of_eval:
                self._warned_of_eval = True
                at = self._validated_at
                by = f'the validation at {at}' if at else 'something'
                runner.logger.warning(
                    f'The model was in eval mode before iteration {runner.iter + 1}, in the '
                    f'middle of an epoch: {by} has left it so. '
                    f'Training goes on in training mode. Call runner.model.train() after a '
                    f'validation inside an epoch.'
                )
        elif not self._modes:
            self._note_modes(runner)
        elif not self._warned_of_eval:
            left = [each for each, training in self._modes if training and not each.training]
            if left:
                self._warned_of_eval = True
                names = [name for name, each in runner.model.named_modules() if each in left]
                runner.logger.warning(
                    f'A hook has put {", ".join(names[:8])} ({len(names)} modules) in eval mode '
                    f'before iteration {runner.iter + 1}, in the middle of an epoch. Call their '
                    f'train() after a validation.'
                )

    def before_val(self, runner: AnyRunner) -> None:
        """Note the modes of the model's parts, and which line validates."""
        self._note_modes(runner)
        frame = user_frame()
        self._validated_at = f'{frame.f_code.co_filename}:{frame.f_lineno}' if frame else ''

    before_test = before_val

    def _note_modes(self, runner: AnyRunner) -> None:
        if unwrap_model(runner.model).training:
            self._modes = [(each, each.training) for each in runner.model.modules()]

    def after_train_iter(self, runner: AnyRunner, *args: object, **kwargs: object) -> None:
        """Note the modes before other hooks can change them."""
        self._note_modes(runner)
