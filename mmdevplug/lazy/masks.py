"""Let mask heads of one-stage detectors go on, on the host, with the boxes chosen there.

How many boxes there are depends on values. The networks of the mask head alone, e.g. the one that
makes prototypes, run on the device; one call fetches the output of each. What combines it with the
coefficients of the chosen boxes is computed on the host, as is the loss.
"""

from typing import Any

from torch import nn

from mmdevplug.accelerators import rank_context
from mmdevplug.utils.pytree import replace_parts, tensors_in

from .copies import HostCopies
from .losses import HostLosses, refusing_mixed_devices


def combine_masks_on_host(model: nn.Module) -> None:
    """Let mask heads that get what a box head has chosen combine masks on the host.

    These are the ``mask_head`` beside a ``bbox_head`` with the method ``get_positive_infos``, as
    those of mmdet have it. Boxes are on the host if their losses are computed there, and in
    predictions.

    Args:
        model (nn.Module): A bare model for a lazy device, changed in place.
    """
    for part in model.modules():
        heads: Any = [getattr(part, f'{name}_head', None) for name in ('bbox', 'mask')]
        boxes, masks = heads
        if masks is not None and hasattr(boxes, 'get_positive_infos'):
            masks.forward = _Masks(masks, boxes)


class _Masks:
    """Replace ``forward`` of a mask head: outputs of its networks are fetched."""

    takes_host_boxes = True

    def __init__(self, head: nn.Module, boxes: nn.Module) -> None:
        self.head, self._active = head, False
        self.losses: Any = vars(boxes).get('loss_by_feat') or HostLosses(boxes)
        self.losses.anchors = []
        for network in head.children():
            network.register_forward_hook(self._fetch)

    def __call__(self, x: object, *args: object, **kwargs: object) -> object:
        chosen = tensors_in((args, kwargs))
        self._active = bool(chosen) and all(each.device.type == 'cpu' for each in chosen)
        try:
            with refusing_mixed_devices(self.head, 'forward'):
                return type(self.head).forward(self.head, x, *args, **kwargs)
        finally:
            self._active, self.losses.anchors = False, []

    def _fetch(self, _: nn.Module, __: object, output: object) -> object:
        if not self._active:
            return output
        # Gradients of earlier copies wait for those of later ones: a varying order of additions
        # would be a new graph each time.
        copies = HostCopies(rank_context().accelerator, tensors_in(output), self.losses.anchors)
        self.losses.anchors = copies.anchors or self.losses.anchors
        return replace_parts(output, copies.of)
