"""Prepare a model for a lazy device: what has other shapes in each batch goes to the host."""

from typing import Union

import torch
from torch import Tensor, nn

from mmdevplug.accelerators import rank_context
from mmdevplug.lazy.losses import HostLosses, compute_losses_on_host, point_encoders
from mmdevplug.lazy.masks import combine_masks_on_host
from mmdevplug.lazy.rois import ToDevice, split_stages
from mmdevplug.utils.logs import log_warning
from mmdevplug.utils.torch_compat import CHECKPOINTS_ANY_GENERATOR


def leave_parts_to_host(model: nn.Module, host_losses: Union[bool, str]) -> None:
    """Leave parts of a bare model on one device to the host.

    ``host_losses`` says which losses these are, see
    :func:`mmdevplug.lazy.losses.compute_losses_on_host`.
    """
    if compute_losses_on_host(model, host_losses):
        encode_voxels_on_host(model)
    combine_masks_on_host(model)
    split_stages(model, losses=host_losses is not False)


def encode_voxels_on_host(model: nn.Module) -> None:
    """Keep points and voxels of a model on the host, up to the image that is made of them.

    The number of voxels of a batch is a shape of the encoder.

    These are models of mmdet3d with an encoder of voxels and a scatter without parameters, which
    puts voxels into an image of one size, as PointPillars and CenterPoint have them.

    Args:
        model (nn.Module): A bare model for a lazy device, changed in place.
    """
    parts = point_encoders(model)
    if parts is None:
        return
    encoder, scatter = parts
    encoder.forward = HostLosses(encoder, 'forward')
    scatter.forward = _Scatter(scatter)


class _Scatter:
    """Replace ``forward`` of an encoder without parameters: its output goes to the device."""

    def __init__(self, scatter: nn.Module) -> None:
        self.scatter = scatter

    def __call__(self, *args: object, **kwargs: object) -> Tensor:
        image = type(self.scatter).forward(self.scatter, *args, **kwargs)
        device = rank_context().accelerator.current_device()
        return ToDevice.apply(None, [image], 0, device, 0, image)[0]


def warn_of_checkpointed_dropout(model: nn.Module) -> None:
    """Name layers whose gradients are wrong because PyTorch runs them again with other numbers."""
    if CHECKPOINTS_ANY_GENERATOR:
        return
    found = [
        f'{outer}.{name}'.strip('.')
        for outer, part in model.named_modules()
        if getattr(part, 'with_cp', False) is True
        for name, layer in part.named_modules()
        if isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0
    ]
    if found:
        log_warning(
            f'with_cp=True: {found[0]} and {len(found) - 1} more layers drop elements inside of '
            f'segments that run a second time in backward. PyTorch {torch.__version__} restores '
            f'random numbers of CUDA alone, so other elements are dropped then, and gradients are '
            f'wrong. Expected: no dropout there. Set its rate to 0, or with_cp=False.'
        )
