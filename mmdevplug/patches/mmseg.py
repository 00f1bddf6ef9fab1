"""Counting what is right among pixels that are not ignored, with shapes that never change.

mmseg's heads choose these pixels with a mask as index. Their number differs from batch to batch,
so a lazy device, which has to run half of the iteration to know it, compiles the other half anew.
"""

import sys
from typing import Any, Callable, Tuple, Union

import torch
from torch import Tensor, nn

from mmdevplug.utils.patching import patch_symbol

_ACCURACY = 'mmseg.models.losses.accuracy'


def patch_accuracy(model: nn.Module) -> int:
    """Let the heads of mmseg in a model count with masks that they multiply with.

    Args:
        model (nn.Module): Any model. The name ``accuracy`` is patched in the modules that its
            classes come from; the function gives the same results on every device.

    Returns:
        int: In how many modules it was patched.
    """
    original = getattr(sys.modules.get(_ACCURACY), 'accuracy', None)
    if original is None:
        return 0
    places = {kind.__module__ for part in model.modules() for kind in type(part).__mro__}
    users = [sys.modules[place] for place in sorted(places) if place in sys.modules]
    users = [user for user in users if getattr(user, 'accuracy', None) is original]
    for user in users:
        patch_symbol(user, 'accuracy', masked(original), listed_owner=_ACCURACY)
    return len(users)


def masked(original: Callable) -> Callable:
    """mmseg's ``accuracy`` without indexing.

    Args:
        original (callable): mmseg's own, for calls that ignore no pixels.
    """

    def accuracy(
        pred: Tensor,
        target: Tensor,
        topk: Union[int, Tuple[int, ...]] = 1,
        thresh: Any = None,
        ignore_index: Any = None,
    ) -> Any:
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
