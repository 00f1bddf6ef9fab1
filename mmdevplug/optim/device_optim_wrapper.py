"""The optimizer wrapper for lazy devices."""

from typing import List, Optional, Sequence, Tuple

import torch
from mmengine.optim import OptimWrapper
from mmengine.registry import OPTIM_WRAPPERS
from torch import Tensor

from mmdevplug.accelerators import devices_of, rank_context
from mmdevplug.errors import ModelError
from mmdevplug.utils.annotations import AnyOptimWrapper
from mmdevplug.utils.model import list_optim_wrappers


@OPTIM_WRAPPERS.register_module()
class DeviceOptimWrapper(OptimWrapper):
    """MMEngine's optimizer wrapper, in which clipping costs a lazy device no execution.

    MMEngine reads the norm of the gradients for the log as soon as it is recorded, which runs a
    graph for this one number. Here it stays on the device until the iteration is materialized,
    and is logged then, before the hooks that write the log. On an eager device, and where nobody
    calls :meth:`log_norms`, everything is as in MMEngine.

    Arguments are those of :class:`mmengine.optim.OptimWrapper`. ``error_if_nonfinite`` of
    ``clip_grad`` reads the norm at once, which costs a lazy device an execution.
    """

    lost: Optional[str] = 'clipping costs a lazy device an execution'
    _logs_later = False
    #: The norms that are still on the device.
    _norms: Tuple[Tensor, ...] = ()

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.accelerator = rank_context().accelerator

    def _clip_grad(self) -> None:
        parameters = [
            parameter
            for group in self.optimizer.param_groups
            for parameter in group['params']
            if parameter.requires_grad and parameter.grad is not None
        ]
        compilation = self.accelerator.compilation
        devices = compilation.recording(parameters)
        if compilation.runs_again:
            compilation.materialize_all(devices)
        on_several = bool(devices) and len(devices_of(parameters)) > 1
        if not (on_several or self._logs_later):
            super()._clip_grad()
            return
        if not parameters:
            return
        # torch_xla replaces PyTorch's function, and mixes the norms of several devices.
        by_device = on_several and self.grad_name == 'grad_norm'
        clip = _clip_grad_norm_by_device if by_device else self.clip_func
        norm = clip(parameters, **self.clip_grad_kwargs)
        if norm is None:
            return  # Clipping by value has none.
        self._norms = (*self._norms, norm)
        if not self._logs_later:
            self._log_norms()

    def log_norms(self) -> None:
        """Log the norms of clipped gradients; on a lazy device the first call delays all to such.

        Call it after an iteration was materialized, when reading norms costs no execution.
        """
        self._logs_later = self.accelerator.compilation.lazy
        self._log_norms()

    def _log_norms(self) -> None:
        norms, self._norms = self._norms, ()
        for norm in norms:
            self.message_hub.update_scalar(f'train/{self.grad_name}', float(norm))


def log_norms(optim_wrapper: AnyOptimWrapper) -> None:
    """Call :meth:`DeviceOptimWrapper.log_norms` of an optimizer wrapper, or of each in a dict."""
    for wrapper in list_optim_wrappers(optim_wrapper):
        if isinstance(wrapper, DeviceOptimWrapper):
            wrapper.log_norms()


def _clip_grad_norm_by_device(
    parameters: Sequence[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    **_: bool,
) -> Tensor:
    """As :func:`torch.nn.utils.clip_grad_norm_`, for a model on several lazy devices.

    PyTorch copies the norm of every parameter to one device, and each copy costs a lazy device an
    execution. Here each device adds up its own norms.
    """
    gradients = [each.grad for each in parameters if each.grad is not None]
    devices = devices_of(gradients)
    groups = [[g for g in gradients if g.device == device] for device in devices]
    parts = [_norm([_norm([g], norm_type) for g in group], norm_type) for group in groups]
    total = _norm([part.to(devices[0]) for part in parts], norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise ModelError(
            f'optim_wrapper.clip_grad: the norm of order {norm_type} of the gradients is '
            f'{float(total)}; expected a finite number. Look at the losses and the data, or set '
            f'error_if_nonfinite=False.'
        )
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for device, group in zip(devices, groups):
        factor_here = factor.to(device)
        for gradient in group:
            gradient.mul_(factor_here.to(gradient.dtype))
    return total


def _norm(tensors: List[Tensor], norm_type: float) -> Tensor:
    """Return the norm of a tensor, or of norms; half precision is added up in float32."""
    values = (tensors[0] if len(tensors) == 1 else torch.stack(tensors)).detach()
    dtype = torch.promote_types(values.dtype, torch.float32)
    return torch.linalg.vector_norm(values, norm_type, dtype=dtype)
