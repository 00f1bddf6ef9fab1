"""Draw the random numbers of a step on a device on the host."""

import re
from functools import partial
from typing import TYPE_CHECKING, Any, Dict, Optional, Sequence, Tuple

import torch
from torch import Tensor

from mmdevplug.utils.pytree import replace_parts, tensors_in
from mmdevplug.utils.torch_compat import DispatchMode

if TYPE_CHECKING:
    from torch._ops import OpOverload

#: Operators that only draw. Fused attention draws dropout, but has to compute on the device.
_DRAWS = re.compile(
    r'aten\.(rand|bernoulli|binomial|cauchy|exponential|geometric|log_normal|multinomial'
    r'|native_dropout\.|normal|poisson|uniform)'
)
_HALF = (torch.float16, torch.bfloat16)


class HostDraws(DispatchMode):
    """Draw on the host, from its generator, what operators would draw on a device.

    So a step on the device gets the random numbers of the same step on the CPU. That one computes
    in float32, in which 16 bits are drawn here, too.

    Args:
        device_type (str): That of the device.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self._device_type = device_type

    def __torch_dispatch__(
        self,
        func: 'OpOverload',
        types: Sequence[type],
        args: Tuple = (),
        kwargs: Optional[Dict[str, Any]] = None,
    ) -> object:
        kwargs = kwargs or {}
        tensors = tensors_in([args, kwargs])
        device: Any = tensors[0].device if tensors else kwargs.get('device')
        elsewhere = device is None or device.type != self._device_type
        # A generator, or a tensor for the result, is the device's own.
        given = kwargs.get('generator') is not None or 'out' in kwargs
        if elsewhere or given or not _DRAWS.match(str(func)):
            return func(*args, **kwargs)
        operands = replace_parts([list(args), kwargs], _on_host, _host_option)
        drawn = func(*operands[0], **operands[1])
        filled = func._schema.arguments[0].alias_info
        if filled is not None and filled.is_write:
            return args[0].copy_(drawn)
        dtypes = [kwargs.get('dtype'), *(each.dtype for each in tensors)]
        half = next((each for each in dtypes if each in _HALF), None)
        return replace_parts(drawn, partial(_to_device, device=device, half=half))


def _on_host(tensor: Tensor) -> Tensor:
    host = tensor.detach().to('cpu', copy=True)
    return host.float() if host.dtype in _HALF else host


def _host_option(option: object) -> object:
    if isinstance(option, torch.device):
        return torch.device('cpu')
    return torch.float32 if option in _HALF else option


def _to_device(tensor: Tensor, device: torch.device, half: Optional[torch.dtype]) -> Tensor:
    return tensor.to(device, half if tensor.is_floating_point() else None)
