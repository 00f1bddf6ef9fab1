"""Explain why mmcv's synchronized batch normalization cannot be made without a process group."""

from functools import wraps
from typing import Any, Callable

from mmengine.dist import is_distributed
from torch import nn

from mmdevplug.errors import ModelError


def explain_missing_group(convert: Callable) -> Callable:
    """Say what mmcv's layer needs where ``convert_sync_batchnorm`` fails without a process group.

    Args:
        convert (callable): ``mmengine.model.convert_sync_batchnorm``.

    Returns:
        callable: It with a :class:`ModelError` in the place of PyTorch's error.
    """

    @wraps(convert)
    def converted(module: nn.Module, implementation: str = 'torch', **kwargs: Any) -> nn.Module:
        try:
            return convert(module, implementation, **kwargs)
        except (ValueError, RuntimeError) as error:
            if implementation != 'mmcv' or is_distributed() or isinstance(error, ModelError):
                raise
            raise ModelError(
                "convert_sync_batchnorm(..., 'mmcv'): mmcv's SyncBatchNorm needs a process group, "
                "and this process has started none. Choose 'torch', or start the job with a "
                'launcher, e.g. mmdevplug train --nproc 2.'
            ) from error

    return converted
