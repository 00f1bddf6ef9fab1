"""Find NaN and infinite gradients while averaging, and stop with their names.

Scaling by the number of ranks reads every value once, and the same pass looks for values that are
not finite. A rank that finds one puts NaN into the first element of the bucket. The sum carries it
to all ranks, so that they agree without a further message.
"""

from typing import List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from mmdevplug.distributed.byte_exchange import gather_json
from mmdevplug.errors import ModelError
from mmdevplug.utils.annotations import AnyGroup


def scale_and_check(flat: Tensor, factor: float) -> bool:
    """Multiply a real tensor, dense or sparse, in place; return whether it has NaN or infinity."""
    values = stored_values(flat).mul_(factor)
    # A sum of finite values may overflow, but one of NaN or infinity is never finite.
    return not (bool(torch.isfinite(values.sum())) or bool(torch.isfinite(values).all()))


def stored_values(tensor: Tensor) -> Tensor:
    """Return the values that a sparse tensor stores, or a dense tensor itself; no copy."""
    # `values()` takes coalesced tensors alone, and backward makes others.
    return tensor._values() if tensor.is_sparse else tensor


def mark_nonfinite(flat: Tensor) -> None:
    """Mark a bucket as not finite; the mark survives all-reduce and compression."""
    # A sparse gradient carries what was found in it: ranks store different elements of it.
    if not flat.is_sparse:
        flat[:1] = float('nan')


def is_marked_nonfinite(flat: Tensor) -> bool:
    """Return whether any rank marked the bucket as not finite."""
    if flat.is_sparse:
        return not bool(torch.isfinite(flat._values()).all())
    return flat.numel() > 0 and not bool(torch.isfinite(flat[0]))


def names_of_nonfinite(named: Sequence[Tuple[str, Optional[Tensor]]]) -> List[str]:
    """Describe gradients that are not finite, e.g. ``'head.weight (3 NaN, 1 Inf of 640)'``."""
    found = []
    for name, gradient in named:
        if gradient is None:
            continue
        values = stored_values(gradient)
        if bool(torch.isfinite(values).all()):
            continue
        nan = int(torch.isnan(values).sum())
        inf = int(torch.isinf(values).sum())
        found.append(f'{name} ({nan} NaN, {inf} Inf of {gradient.numel()})')
    return found


class FinitePolicy:
    """Stop training on all ranks if gradients of any rank are not finite.

    Attributes:
        suspended (bool): Whether a gradient scaler skips updates. Its search for the right scale
            makes gradients overflow on purpose.
        active (bool): Whether to check for gradients that are not finite.
    """

    def __init__(self, stops: bool, group: AnyGroup = None) -> None:
        self.active = self.stops = stops
        self.group, self.suspended = group, False

    def stop(self, found_here: Sequence[str], ignorable: bool = True) -> None:
        """Exchange what the ranks found, see :func:`names_of_nonfinite`; all ranks must call it.

        Args:
            found_here (list[str]): Of this rank.
            ignorable (bool): Whether an option goes on training. Defaults to True.

        Raises:
            ModelError: On every rank.
        """
        found = gather_json(list(found_here[:5]), self.group)
        lines = [
            f'  rank {rank}: {", ".join(names)}' for rank, names in enumerate(found) if names
        ] or ['  every rank has finite gradients: they overflow when compressed or added up']
        option = "; or train with model_wrapper_cfg=dict(nonfinite_grads='ignore')"
        raise ModelError(
            'gradients are not finite:\n' + '\n'.join(lines) + '\nThe weights are those of the '
            'last good update. Look at the data of that rank (on torch_xla for a label that is no '
            'class, too) and at the loss, lower the learning rate, or clip gradients'
            f'{option if ignorable else ""}.'
        )
