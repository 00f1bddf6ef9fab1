"""Stop a run whose loss is not a finite number."""

import math
from typing import Any, Dict, Optional, Union

from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from mmdevplug.errors import DevPlugError, ModelError


def check_on_nan(value: Optional[str]) -> None:
    """Refuse an unknown value of ``accelerator.on_nan``.

    Raises:
        DevPlugError: If it is unknown.
    """
    if value not in (None, 'stop'):
        raise DevPlugError(
            f"accelerator.on_nan={value!r}: expected 'stop' or None. To pass over updates whose "
            f"gradients are not finite, take model_wrapper_cfg=dict(nonfinite_grads='skip'): when "
            f'a loss can be read, its update is done already on some devices.'
        )


@HOOKS.register_module()
class LossCheckHook(Hook):
    """Stop at the first iteration with a NaN or infinite loss, on all ranks.

    MMDetection's ``CheckInvalidLossHook`` looks at the loss on the device every 50 iterations,
    which costs a lazy device an execution. This hook looks at what MMEngine has brought to the
    host for the log, which is there after every iteration and costs nothing.
    """

    # Right after RuntimeInfoHook, which is VERY_HIGH, and before anything is logged or saved.
    priority = 'HIGH'

    def after_train_iter(
        self,
        runner: Any,
        batch_idx: int,
        data_batch: Optional[Union[dict, tuple, list]] = None,
        outputs: Optional[dict] = None,
    ) -> None:
        """Check what was logged of this iteration.

        Args:
            runner (Runner): The runner.
            batch_idx (int): Index of the batch in the loop.
            data_batch (dict or tuple or list, optional): The batch.
            outputs (dict, optional): What ``train_step`` returned.

        Raises:
            ModelError: If a loss is not finite.
        """
        found = _nonfinite_losses(runner.message_hub.log_scalars, outputs or {})
        if not found:
            return
        rates = ', '.join(
            f'{name}={values[0]:g}' for name, values in runner.optim_wrapper.get_lr().items()
        )
        told = ', '.join(f'{name}={value}' for name, value in found.items())
        raise ModelError(
            f'rank {runner.rank}, iteration {runner.iter + 1}: {told}; learning rate {rates}. '
            f'accelerator.on_nan asks to stop at a loss that is not finite. Look at the batch of '
            f'that rank, lower the learning rate, clip gradients, or train without mixed '
            f'precision; the last checkpoint is from before.'
        )


def _nonfinite_losses(scalars: Any, outputs: Dict[str, Any]) -> Dict[str, float]:
    """Losses among what ``train_step`` returned, as MMEngine's own hook has logged them."""
    found = {}
    for name in outputs:
        logged = scalars.get(f'train/{name}')
        if 'loss' in name and logged is not None and not math.isfinite(logged.current()):
            found[name] = float(logged.current())
    return found
