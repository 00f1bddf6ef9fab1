"""Average gradients through host memory while backward runs, on eager devices."""

from typing import Any, List, Sequence, Set

import torch

from .host_staging import BUCKET_BYTES, HostStaging

#: A bucket has at most this fraction of all gradients, so that most of them start before backward
#: ends.
BUCKET_PARTS = 8
#: Smaller messages cost more than they hide.
MIN_BUCKET_BYTES = 256 << 10


class OverlappedStaging(HostStaging):
    """Average gradients through host memory, starting each bucket when backward has filled it.

    The plan says which gradients travel during backward: those that were used in the last
    iteration. Two kinds need more at the end of backward. A *late* gradient is used but not in the
    plan; it goes into a further bucket. A *repeated* gradient arrives in several parts, e.g. of a
    layer in two reentrant checkpoints; its bucket is averaged again, and it leaves the plan.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        count = len(self.parameters)
        self._ever_repeated: Set[int] = set()
        # Backward reaches the last parameters first.
        self._set_plan(list(reversed(range(count))))
        self._begin_iteration()
        # Nodes of the autograd graph live only as long as somebody holds them.
        self._nodes = [self._watch(index) for index in range(count)]

    def _default_bucket_bytes(self) -> int:
        return max(MIN_BUCKET_BYTES, min(BUCKET_BYTES, self._bytes // BUCKET_PARTS))

    def _set_plan(self, indices: List[int]) -> None:
        self._plan = indices
        self._buckets = self._layout.divide(indices)
        self._bucket_of = {i: bucket.number for bucket in self._buckets for i in bucket.indices}
        self._divided = None

    def _begin_iteration(self) -> None:
        super()._begin_iteration()
        self._seen = [False] * len(self.parameters)
        self._repeated = [False] * len(self.parameters)
        self._missing = [len(bucket.indices) for bucket in self._buckets]

    def _watch(self, index: int) -> Any:
        """Register a hook that runs after backward has added to ``.grad``."""
        parameter = self.parameters[index]
        node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
        self._hooks.append(node.register_hook(lambda *_: self._mark_ready(index)))
        return node

    def _mark_ready(self, index: int) -> None:
        """Count a gradient, and start the buckets that are full."""
        self._mark_used(index)
        if not self._synchronize:
            return
        if self._seen[index]:
            # A further part of the gradient: the bucket with the first has perhaps started.
            self._repeated[index] = True
            return
        self._seen[index] = True
        if index not in self._bucket_of:
            return
        self._missing[self._bucket_of[index]] -= 1
        with torch.no_grad():
            # All ranks start buckets in the same order, in whichever order they become full.
            for bucket in self._buckets[len(self._works) :]:
                if self._missing[bucket.number]:
                    break
                self._start(bucket)

    def _finish(self) -> None:
        with torch.no_grad():
            for bucket in self._buckets[len(self._works) :]:
                self._start(bucket)
            used, repeated = self._agree(self._repeated)
            planned = set(self._plan)
            late = [index for index in _true(used) if index not in planned]
            for bucket in self._divide(late, after=self._buckets):
                self._start(bucket)
            again = planned.intersection(_true(repeated))
            if again:
                self._average_again(again)
            nonfinite = self._send_averages(used)
            self._update_plan(used, repeated)
            self._end_iteration(nonfinite)

    def _average_again(self, repeated: Set[int]) -> None:
        """Average the buckets of gradients that were not complete a second time."""
        for work in self._works:
            self._complete(work)
        self.reduction.end()
        self.reduction.begin()
        works = self._works
        self._works = [work for work in works if repeated.isdisjoint(work.bucket.indices)]
        for work in works:
            if work not in self._works:
                self._start(work.bucket)

    def _update_plan(self, used: Sequence[bool], repeated: Sequence[bool]) -> None:
        """Plan for gradients that were used this time and never came in parts."""
        self._ever_repeated.update(_true(repeated))
        plan = [i for i in reversed(_true(used)) if i not in self._ever_repeated]
        if plan != self._plan:
            self._set_plan(plan)
            self._reset_compression()


def _true(flags: Sequence[bool]) -> List[int]:
    """Return the indices of the flags that are set."""
    return [index for index, flag in enumerate(flags) if flag]
