"""Compute batch normalization with frozen statistics on lazy devices.

torch_xla has no gradient of PyTorch's own in eval mode, in which ``norm_eval=True`` of OpenMMLab's
backbones trains: backward fails.
"""

import torch
from mmengine.model.utils import _BatchNormXd
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from .sync_bn import normalize_frozen


class FrozenGradient(_BatchNorm):
    """Batch normalization that has a gradient in eval mode, for it computes in simple operations.

    In training mode, and where no gradients are wanted, it is what it was.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Normalize a batch; see :class:`torch.nn.BatchNorm2d`."""
        frozen = not self.training and self.running_mean is not None
        if not (frozen and torch.is_grad_enabled()):
            return super().forward(input)
        self._check_input_dim(input)
        return normalize_frozen(self, input)


class FrozenGradientBatchNorm1d(FrozenGradient, nn.BatchNorm1d):
    """See :class:`FrozenGradient`."""


class FrozenGradientBatchNorm2d(FrozenGradient, nn.BatchNorm2d):
    """See :class:`FrozenGradient`."""


class FrozenGradientBatchNorm3d(FrozenGradient, nn.BatchNorm3d):
    """See :class:`FrozenGradient`."""


class FrozenGradientBatchNormXd(FrozenGradient, _BatchNormXd):
    """See :class:`FrozenGradient`; MMEngine's layer for inputs of any number of dimensions."""


REPLACED_BY = {
    nn.BatchNorm1d: FrozenGradientBatchNorm1d,
    nn.BatchNorm2d: FrozenGradientBatchNorm2d,
    nn.BatchNorm3d: FrozenGradientBatchNorm3d,
    _BatchNormXd: FrozenGradientBatchNormXd,
}


def give_frozen_gradients(module: nn.Module) -> None:
    """Let the ordinary batch normalizations of a model be trained in eval mode.

    The layers keep their identity and only change their class, to a subclass of the one they had.

    Args:
        module (nn.Module): A model for a lazy device; changed in place.
    """
    for part in module.modules():
        if type(part) in REPLACED_BY:
            part.__class__ = REPLACED_BY[type(part)]
