"""Look inside model wrappers and dicts of optimizer wrappers."""

from typing import Any, List

from mmengine.model import is_model_wrapper
from mmengine.optim import OptimWrapper, OptimWrapperDict
from torch import nn

from mmdevplug.utils.annotations import AnyOptimWrapper


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the model inside a wrapper, or the model itself if it is not wrapped."""
    inner: Any = model.module if is_model_wrapper(model) else model
    return inner


def list_optim_wrappers(optim_wrapper: AnyOptimWrapper) -> List[OptimWrapper]:
    """List the optimizer wrappers in an OptimWrapper or OptimWrapperDict."""
    if isinstance(optim_wrapper, OptimWrapperDict):
        return list(optim_wrapper.values())
    return [optim_wrapper]


def accumulative_counts(optim_wrapper: AnyOptimWrapper) -> int:
    """The iterations between two updates, the most of several optimizers."""
    most = 1
    for each in list_optim_wrappers(optim_wrapper):
        most = max(most, getattr(each, '_accumulative_counts', 1))
    return most
