"""Prepare a model for a lazy device: what has other shapes in each batch goes to the host."""

from typing import Any, Union

from torch import Tensor, nn

from mmdevplug.accelerators import Accelerator, rank_context
from mmdevplug.lazy.losses import HostLosses, compute_losses_on_host, point_encoders
from mmdevplug.lazy.masks import combine_masks_on_host
from mmdevplug.lazy.rois import ToDevice, split_stages
from mmdevplug.patches.deformable_attention import patch_deformable_attention
from mmdevplug.patches.mmseg import patch_accuracy


def prepare_for_lazy_device(
    model: nn.Module, accelerator: Accelerator, host_losses: Union[bool, str], on_one: bool
) -> None:
    """Patch what a bare model calls; if it is ``on_one`` device, also leave parts to the host.

    ``host_losses`` says which losses these are, see
    :func:`mmdevplug.lazy.losses.compute_losses_on_host`.
    """
    patch_accuracy(model)
    patch_deformable_attention(accelerator.device_type)
    if on_one:
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

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        image = type(self.scatter).forward(self.scatter, *args, **kwargs)
        device = rank_context().accelerator.current_device()
        return ToDevice.apply(None, [image], 0, device, 0, image)[0]
