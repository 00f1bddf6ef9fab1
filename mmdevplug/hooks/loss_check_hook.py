"""Stop a run whose loss is not a finite number."""

import math
from typing import Any, Dict, Mapping, Optional

from mmengine.hooks import Hook
from mmengine.logging import HistoryBuffer
from mmengine.registry import HOOKS

from mmdevplug.errors import ModelError
from mmdevplug.utils.annotations import AnyRunner


@HOOKS.register_module()
class LossCheckHook(Hook):
    """Stop at the first iteration with a NaN or infinite loss, on all ranks.

    MMDetection's ``CheckInvalidLossHook`` reads the loss from the device every 50 iterations,
    which costs a lazy device an execution. This hook reads what MMEngine has copied to the host
    for the log, after every iteration and at no cost.
    """

    # Right after RuntimeInfoHook, which is VERY_HIGH, and before anything is logged or saved.
    priority = 'HIGH'

    def after_train_iter(
        self,
        runner: AnyRunner,
        batch_idx: int,
        data_batch: object = None,
        outputs: Optional[dict] = None,
    ) -> None:
        """Raise ModelError if a loss of this iteration is not finite."""
        found = _nonfinite_losses(runner.message_hub.log_scalars, outputs or {})
        if not found:
            return
        rates = ', '.join(
            f'{name}={values[0]:g}' for name, values in runner.optim_wrapper.get_lr().items()
        )
        losses = ', '.join(f'{name}={value}' for name, value in found.items())
        raise ModelError(
            f'rank {runner.rank}, iteration {runner.iter + 1}: {losses}; learning rate {rates}. '
            f'accelerator.on_nan asks to stop at a loss that is not finite. Look at the batch of '
            f'that rank, lower the learning rate, clip gradients, or train without mixed '
            f'precision; the last checkpoint is from before.'
        )


def _nonfinite_losses(
    scalars: Mapping[str, HistoryBuffer], outputs: Dict[str, Any]
) -> Dict[str, float]:
    """Losses in the outputs of ``train_step``, as MMEngine's own hook has logged them."""
    found = {}
    for name in outputs:
        logged = scalars.get(f'train/{name}')
        if 'loss' in name and logged is not None and not math.isfinite(logged.current()):
            found[name] = float(logged.current())
    return found
