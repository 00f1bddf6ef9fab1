"""Let tensor methods and functions of torch_xla do what they do on other devices."""

from functools import wraps
from typing import Any, Callable

import torch
from torch import Tensor

from mmdevplug.utils.patching import patch_symbol
from mmdevplug.utils.torch_compat import NAMES_LAZY_TENSORS

from .xla_operators import patch_operators


def patch_tensor_methods() -> None:
    """Patch ``Tensor.type`` and ``index_select`` for tensors of torch_xla."""
    patch_symbol(Tensor, 'type', _casting(Tensor.type))
    for owner in (Tensor, torch) if NAMES_LAZY_TENSORS else ():  # not on a T20
        patch_symbol(owner, 'index_select', _selecting(owner.index_select))
    if NAMES_LAZY_TENSORS:
        patch_operators()


def _casting(type_of: Callable) -> Callable:
    """Name the type of a tensor as PyTorch 2 does, and cast to the types that it names.

    PyTorch 1 has no name for these tensors, and none takes ``'torch.xla.FloatTensor'``.
    """

    @wraps(type_of)
    def cast(tensor: Tensor, dtype: object = None, *args: object, **kwargs: object) -> object:
        if dtype is None and tensor.device.type == 'xla':
            of_host = type_of(torch.empty(0, dtype=tensor.dtype))
            return of_host.replace('torch.', 'torch.xla.', 1)
        if not isinstance(dtype, str) or not dtype.startswith('torch.xla.'):
            return type_of(tensor, dtype, *args, **kwargs)
        device = tensor.device if tensor.device.type == 'xla' else torch.device('xla')
        return tensor.to(device, getattr(torch, dtype.rpartition('.')[2]).dtype)

    return cast


def _selecting(select: Callable) -> Callable:
    """Select by copies of indices.

    torch_xla 2.9 aborts the process if they are an output of ``sort`` or ``topk`` as it is, which
    has no shape of its own; those of mmcv's ``nms_rotated`` are.
    """

    @wraps(select)
    def index_select(*args: Any, **kwargs: Any) -> Tensor:
        index = args[2] if len(args) > 2 else kwargs.pop('index')
        if index.device.type == 'xla':
            index = index + 0
        return select(*args[:2], index=index, **kwargs)

    return index_select
