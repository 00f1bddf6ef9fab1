"""Compute mmseg's accuracy with constant shapes, and its focal loss on any device.

mmseg's heads index with the mask of pixels that are not ignored. Their number differs from batch
to batch, so a lazy device runs half of the iteration to know it and recompiles the other half.
"""

import sys
from functools import wraps
from typing import Any, Callable, Optional, Tuple, Union

import torch
from torch import Tensor, nn

from mmdevplug.utils.patching import patch_symbol

_ACCURACY, _FOCAL = 'mmseg.models.losses.accuracy', 'mmseg.models.losses.focal_loss'


def patch_accuracy(model: nn.Module) -> int:
    """Patch ``accuracy`` in the modules of a model's classes; returns in how many.

    The replacement multiplies with the mask, and gives the same results on every device.
    """
    original = getattr(sys.modules.get(_ACCURACY), 'accuracy', None)
    if original is None:
        return 0
    places = {kind.__module__ for part in model.modules() for kind in type(part).__mro__}
    users = [sys.modules[place] for place in sorted(places) if place in sys.modules]
    users = [user for user in users if getattr(user, 'accuracy', None) is original]
    for user in users:
        patch_symbol(user, 'accuracy', _masked(original))
    return len(users)


def _masked(original: Callable) -> Callable:
    def accuracy(
        pred: Tensor,
        target: Tensor,
        topk: Union[int, Tuple[int, ...]] = 1,
        thresh: Optional[float] = None,
        ignore_index: Optional[int] = None,
    ) -> object:
        if ignore_index is None or thresh is not None or pred.size(0) == 0:
            return original(pred, target, topk, thresh, ignore_index)
        several = topk if isinstance(topk, tuple) else (topk,)
        labels = pred.topk(max(several), dim=1)[1].transpose(0, 1)
        counted = target != ignore_index
        right = labels.eq(target.unsqueeze(0).expand_as(labels)) & counted
        eps = torch.finfo(torch.float32).eps
        total = counted.sum() + eps
        found = [(right[:k].sum().float().view(1) + eps) * (100.0 / total) for k in several]
        return found if isinstance(topk, tuple) else found[0]

    return accuracy


def patch_focal_loss() -> None:
    """Let mmseg's ``FocalLoss`` take labels on a device without CUDA.

    There it takes one column of their one-hot code in place of one for each class, and fails. Here
    it gets the code as it gets probabilities, and ignored pixels have the weight 0.
    """
    kind = getattr(sys.modules.get(_FOCAL), 'FocalLoss', None)
    if kind is not None and not hasattr(kind.forward, '__wrapped__'):
        patch_symbol(kind, 'forward', _of_labels(kind.forward))


def _of_labels(original: Callable) -> Callable:
    @wraps(original)
    def forward(
        self: nn.Module,
        pred: Tensor,
        target: Tensor,
        weight: Optional[Tensor] = None,
        avg_factor: Optional[int] = None,
        reduction_override: Optional[str] = None,
        ignore_index: int = 255,
        **kwargs: Any,
    ) -> Tensor:
        if pred.device.type == 'cuda' or pred.shape == target.shape:
            rest = weight, avg_factor, reduction_override, ignore_index
            return original(self, pred, target, *rest, **kwargs)
        count = pred.shape[1]
        # A single class is the one of the label 1.
        classes = torch.arange(count, device=target.device) if count > 1 else target.new_ones(1)
        of_class = target.unsqueeze(1) == classes.view(1, -1, *[1] * (target.dim() - 1))
        kept = target != ignore_index
        outside = kept & ((target < 0) | (target > count))  # one more stands for no class
        kept = kept.to(pred.dtype).masked_fill(outside, float('nan')).flatten()
        if weight is not None:
            kept = weight * kept.view(-1, *[1] * (weight.dim() - 1))
        # It would compare it with the class of each pixel.
        return original(
            self, pred, of_class.long(), kept, avg_factor, reduction_override, -1, **kwargs
        )

    return forward
