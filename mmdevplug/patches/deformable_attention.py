"""Let deformable attention be one graph on lazy devices.

It reads the sizes of feature maps from a tensor on the device, several numbers in each layer,
each of which is an execution; PyTorch knows them on the host. And it samples with
``grid_sample``, which torch_xla leaves to the host in the middle of the graph.
"""

from functools import lru_cache, partial
from typing import Callable, Dict, Optional, Sequence, Tuple

import torch
from torch import Tensor

from mmdevplug.utils.patching import patch_symbol
from mmdevplug.utils.pytree import replace_parts, tensors_in
from mmdevplug.utils.torch_compat import decomposition_of, plain_tensor_functions

_shape_as_tensor = torch._shape_as_tensor


class HostSizes(Tensor):
    """Sizes on the host, of which tensors of a device that they meet get copies."""

    @classmethod
    def __torch_function__(
        cls,
        function: Callable,
        types: Sequence[type],
        args: Tuple[object, ...] = (),
        kwargs: Optional[Dict[str, object]] = None,
    ) -> object:
        kwargs = kwargs or {}
        if function is Tensor.to and [type(arg) for arg in args[1:]] == [torch.device]:
            return args[0]
        with plain_tensor_functions():
            devices = {t.device for t in tensors_in((args, kwargs))} - {torch.device('cpu')}
            if devices:
                (device,) = devices
                args, kwargs = replace_parts((args, kwargs), partial(_beside, device=device))
                return function(*args, **kwargs)
        return super().__torch_function__(function, types, args, kwargs)


def _beside(tensor: Tensor, device: torch.device) -> Tensor:
    """Sizes for a function of tensors of a device, which takes single numbers of the host."""
    if not isinstance(tensor, HostSizes):
        return tensor
    plain = tensor.as_subclass(Tensor)
    return plain.to(device) if plain.dim() else plain


def patch_deformable_attention(device_type: str) -> None:
    """Let ``torch._shape_as_tensor`` return sizes that stay on the host; see above.

    Args:
        device_type (str): That of the lazy device.
    """
    if torch._shape_as_tensor is not _host_sizes:
        patch_symbol(torch, '_shape_as_tensor', _host_sizes)
    if device_type == 'xla':
        _register_grid_sampler()


def _host_sizes(tensor: Tensor) -> Tensor:
    sizes = _shape_as_tensor(tensor)
    return sizes if tensor.device.type == 'cpu' else sizes.as_subclass(HostSizes)


@lru_cache(maxsize=None)
def _register_grid_sampler() -> object:
    """Compute bilinear samples and their gradients from operators that torch_xla has."""
    decomposed = decomposition_of('grid_sampler_2d')
    if decomposed is None:
        return None
    library = torch.library.Library('aten', 'IMPL')  # what it registers goes with this object
    library.impl('grid_sampler_2d', decomposed, 'AutogradXLA')
    return library
