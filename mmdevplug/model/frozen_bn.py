"""Compute batch normalization with frozen statistics on lazy devices.

torch_xla has no gradient of PyTorch's own in eval mode, in which ``norm_eval=True`` of OpenMMLab's
backbones trains: backward fails.
"""

import torch
from mmengine.model.utils import _BatchNormXd
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from .normalize import normalize_frozen
from .sync_bn import DeviceSyncBatchNorm


class FrozenGradient(_BatchNorm):
    """Batch normalization with a gradient in eval mode, computed in simple operations."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalize a batch."""
        frozen = not self.training and self.running_mean is not None
        if not (frozen and torch.is_grad_enabled()):
            return super().forward(input)
        self._check_input_dim(input)
        return normalize_frozen(self, input)


class FrozenGradientBatchNorm1d(FrozenGradient, nn.BatchNorm1d):
    pass


class FrozenGradientBatchNorm2d(FrozenGradient, nn.BatchNorm2d):
    pass


class FrozenGradientBatchNorm3d(FrozenGradient, nn.BatchNorm3d):
    pass


class FrozenGradientBatchNormXd(FrozenGradient, _BatchNormXd):
    pass


class FrozenGradientSyncBatchNorm(FrozenGradient, DeviceSyncBatchNorm):
    pass


REPLACED_BY = {
    nn.BatchNorm1d: FrozenGradientBatchNorm1d,
    nn.BatchNorm2d: FrozenGradientBatchNorm2d,
    nn.BatchNorm3d: FrozenGradientBatchNorm3d,
    _BatchNormXd: FrozenGradientBatchNormXd,
    DeviceSyncBatchNorm: FrozenGradientSyncBatchNorm,
}


def give_frozen_gradients(module: nn.Module) -> None:
    """Make a lazy device train the batch normalizations of a model in eval mode.

    The layers keep their identity and only change their class, to a subclass of the one they had.
    """
    for part in module.modules():
        if type(part) in REPLACED_BY:
            part.__class__ = REPLACED_BY[type(part)]
