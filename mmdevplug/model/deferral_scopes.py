"""Prepare a model for outputs of synchronized batch normalization that are computed later.

Such an output stays inside the module that calls the layer, and reaches no module that could read
it without PyTorch's functions. Modules that only pass tensors on are an exception.
"""

import sys
from typing import Any, Callable, List

import torch
from torch import nn

from mmdevplug.utils.torch_compat import hooks_take_keywords

from .deferred_norm import DEFERRED, resolve_arguments
from .sync_bn import DeviceSyncBatchNorm

#: Modules of mmcv that only call others in turn.
_OF_MMCV = (
    ('mmcv.cnn.bricks.conv_module', 'ConvModule'),
    ('mmcv.cnn.bricks.depthwise_separable_conv_module', 'DepthwiseSeparableConvModule'),
)


def defer_in(model: nn.Module) -> None:
    """Let the layers of a model defer their outputs, up to the end of the module around them."""
    parts = list(model.modules())
    if any(isinstance(part, torch.jit.ScriptModule) for part in parts):
        return  # It reads its arguments without PyTorch's functions, and takes no hooks.
    passing = _passing_forwards()
    for part in parts:
        if isinstance(part, DeviceSyncBatchNorm):
            part.defers = part is not model
            continue
        passes = part is not model and _forward_of(part) in passing
        if passes:
            continue
        if any(isinstance(inner, DeviceSyncBatchNorm) for inner in part.modules()):
            part.register_forward_hook(_resolve_at_end)
        if not type(part).__module__.startswith('torch.nn.'):
            if hooks_take_keywords():
                part.register_forward_pre_hook(_resolve_with_keywords, with_kwargs=True)
            else:
                part.register_forward_pre_hook(_resolve_before)


def _passing_forwards() -> List[Callable]:
    """The methods ``forward`` of modules that do nothing themselves but call others in turn."""
    found: List[Callable] = [nn.Sequential.forward]
    for module, name in _OF_MMCV:
        if module in sys.modules:
            found.append(getattr(sys.modules[module], name).forward)
    return found


def _forward_of(module: nn.Module) -> Any:
    return None if 'forward' in vars(module) else type(module).forward


def _resolve_at_end(module: nn.Module, args: Any, output: Any) -> None:
    DEFERRED.resolve()


def _resolve_before(module: nn.Module, args: Any) -> None:
    resolve_arguments(args)


def _resolve_with_keywords(module: nn.Module, args: Any, kwargs: Any) -> None:
    resolve_arguments(args, kwargs)
