"""Find NaN and infinite gradients while averaging, name them, and apply the policy.

Scaling by the number of ranks reads every value once, and the same pass looks for values that are
not finite. A rank that finds one puts NaN into the first element of the bucket. The sum carries it
to all ranks, so that they agree without a further message.
"""

from typing import List, Optional, Sequence, Tuple

import torch
from torch import Tensor, distributed as torch_dist

from mmdevplug.distributed.byte_exchange import gather_json
from mmdevplug.errors import ModelError
from mmdevplug.staged.host_buffers import scale
from mmdevplug.utils.annotations import AnyGroup
from mmdevplug.utils.logs import log_warning


def scale_and_check(flat: Tensor, factor: float) -> bool:
    """Multiply a real tensor, dense or sparse, in place; return whether it has NaN or infinity."""
    return not scale(stored_values(flat), factor)


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
    """Stop training or skip an update on all ranks if gradients of any rank are not finite.

    Attributes:
        suspended (bool): Whether a gradient scaler skips updates. Its search for the right scale
            makes gradients overflow on purpose.
        skipped (int): How many updates were skipped so far.
    """

    def __init__(self, policy: str, group: AnyGroup = None) -> None:
        self.policy = policy
        self.group = group
        self.suspended = False
        self.skipped = 0

    @property
    def active(self) -> bool:
        """Return whether to check for gradients that are not finite."""
        return self.policy != 'ignore' and not self.suspended

    def apply(self, found_here: Sequence[str]) -> None:
        """Exchange what the ranks found, then raise an error, or log that the update is skipped.

        All ranks must call it, with what they found, see :func:`names_of_nonfinite`.
        """
        found = gather_json(list(found_here[:5]), self.group)
        lines = [
            f'  rank {rank}: {", ".join(names)}' for rank, names in enumerate(found) if names
        ] or ['  every rank has finite gradients: they overflow when compressed or added up']
        text = 'gradients are not finite:\n' + '\n'.join(lines)
        if self.policy == 'stop':
            raise ModelError(
                f'{text}\nThe weights are those of the last good update. Look at the data of that '
                f'rank and at the loss, lower the learning rate, clip gradients, or skip such '
                f"iterations with model_wrapper_cfg=dict(nonfinite_grads='skip')."
            )
        self.skipped += 1
        if torch_dist.get_rank(self.group) == 0:
            log_warning(f'Update {self.skipped} skipped: {text}')
