"""Encode point clouds on the host: the number of voxels of a batch is a shape of the encoder."""

from typing import Any

from torch import Tensor, nn

from mmdevplug.accelerators.context import current_accelerator

from .host_losses import HostLosses, point_encoders
from .host_rois import ToDevice


def encode_voxels_on_host(model: nn.Module) -> None:
    """Keep points and voxels of a model on the host, up to the image that is made of them.

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

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        image = type(self.scatter).forward(self.scatter, *args, **kwargs)
        device = current_accelerator().current_device()
        return ToDevice.apply(None, [image], 0, device, 0, image)[0]
