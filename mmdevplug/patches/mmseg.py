"""Compute mmseg's accuracy with constant shapes.

mmseg's heads index with the mask of pixels that are not ignored. Their number differs from batch
to batch, so a lazy device runs half of the iteration to know it and recompiles the other half.
"""

import sys
from typing import Callable, Optional, Tuple, Union

import torch
from torch import Tensor, nn

from mmdevplug.utils.patching import patch_symbol

_ACCURACY = 'mmseg.models.losses.accuracy'


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
