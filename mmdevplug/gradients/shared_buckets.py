"""Average the buckets of PyTorch's DDP in memory that the ranks of a host share."""

import time
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor, nn

from .buckets import Bucket, numel_by_dtype
from .ddp_hook import BucketAveraging
from .host_staging import BucketWork
from .nonfinite import FinitePolicy, names_of_nonfinite
from .reduction import TwoLevelReduction, make_reduction

#: Of gradients of fewer bytes, the message takes less time than the barriers in its place.
LEAST_BYTES = 4 << 20


def cpu_defaults(
    named_parameters: Sequence[Tuple[str, nn.Parameter]], shares: bool
) -> Dict[str, Any]:
    """Arguments of DDP on the CPU: gradients that are views of a bucket need no copy.

    The message of a small bucket starts earlier; where ranks share memory, barriers cost more.
    """
    cap = 16 if shares and _bytes_of(named_parameters) >= LEAST_BYTES else 5
    return dict(gradient_as_bucket_view=True, bucket_cap_mb=cap)


def _bytes_of(named_parameters: Sequence[Tuple[str, nn.Parameter]]) -> int:
    return sum(each.numel() * each.element_size() for _, each in named_parameters)


class _Started(NamedTuple):
    """A bucket that is being averaged: DDP's memory, the work on ours, and what DDP waits for."""

    flat: Tensor
    work: BucketWork
    future: torch.futures.Future


class SharedBucketAveraging(BucketAveraging):
    """Copy each bucket into shared memory, add up a share of it, and copy all shares back.

    Ranks of one host exchange nothing but barriers; hosts exchange shares. What the memory has no
    place for (sparse gradients, half precision) is averaged by messages.

    Attributes:
        active (bool): False for messages alone, which DDP's ``join`` answers.
    """

    def __init__(
        self,
        named_parameters: Sequence[Tuple[str, nn.Parameter]],
        group: Any,
        policy: FinitePolicy,
        reduction: TwoLevelReduction,
        memory: Dict[torch.dtype, Tensor],
    ) -> None:
        self.active = True
        self.reduction, self._memory = reduction, memory
        super().__init__(named_parameters, group, None, policy)

    @classmethod
    def where_shared(
        cls,
        named_parameters: Sequence[Tuple[str, nn.Parameter]],
        group: Any,
        policy: FinitePolicy,
        hierarchy: Union[str, bool],
        before: Optional[BucketAveraging] = None,
    ) -> Optional['SharedBucketAveraging']:
        """Return one where ranks share memory and that pays; None on all ranks elsewhere.

        It stands in for ``before``, if given.
        """
        summed = [(n, p) for n, p in named_parameters if p.dtype in (torch.float32, torch.float64)]
        if not summed or _bytes_of(summed) < LEAST_BYTES:
            return None
        sizes = numel_by_dtype([parameter for _, parameter in summed])
        earlier = before.reduction if isinstance(before, SharedBucketAveraging) else None
        if earlier is not None:
            earlier.begin()
        reduction, memory = make_reduction(
            sizes, group, None, hierarchy, pin_memory=False, before=earlier
        )
        if not isinstance(reduction, TwoLevelReduction):
            return None
        return cls(named_parameters, group, policy, reduction, memory)

    def _begin_iteration(self) -> None:
        super()._begin_iteration()
        self._works: List[_Started] = []
        self._filled = dict.fromkeys(self._memory, 0)
        self._before = self.reduction.sent, self.reduction.shared

    def hook(self, state, bucket):
        """See :meth:`BucketAveraging.hook`."""
        flat = bucket.buffer()
        shared = self._place(flat) if self.active and not flat.is_sparse else None
        if shared is None:
            return super().hook(state, bucket)
        self._enter_iteration()
        if not self._works:
            self.reduction.begin()
        shared.copy_(flat)
        here = Bucket(shared, [])
        work = BucketWork(here, self.reduction.average(here, self.policy.active))
        self._works.append(_Started(flat, work, torch.futures.Future()))
        for started in self._works:
            if not started.work.completed:
                started.work.advance()
        self._messages += 1
        self._last_started = time.perf_counter()
        return self._works[-1].future

    def _place(self, flat: Tensor) -> Optional[Tensor]:
        """Shared memory for a bucket: the same on all ranks, which have buckets in one order."""
        memory = self._memory.get(flat.dtype)
        if memory is None:
            return None
        start = self._filled[flat.dtype]
        self._filled[flat.dtype] = end = start + flat.numel()
        return memory[start:end] if end <= memory.numel() else None

    def _wait_for_ddp(self) -> None:
        # Before DDP's own callback, which waits for the futures.
        with torch.no_grad():
            for started in self._works:
                started.work.wait()
            if not all(started.work.finite for started in self._works):
                self._not_finite = True
                # Messages have replaced gradients of other kinds, and looked at them before.
                own = [p for p in self._parameters if p.dtype in self._memory]
                dense = [p for p in own if p.grad is not None and not p.grad.is_sparse]
                self._found += names_of_nonfinite([(self._names[id(p)], p.grad) for p in dense])
            for started in self._works:
                self.reduction.copy_results(started.work.bucket.flat, started.flat)
                started.future.set_result(started.flat)
        if self._works:
            self.reduction.end()
            self._completed = time.perf_counter()
        self._sent += self.reduction.sent - self._before[0]
        self._shared = self.reduction.shared - self._before[1]
        super()._wait_for_ddp()
