"""Average gradients through host memory at the end of backward.

On a lazy device every copy during backward costs an execution of the graph. So backward only
records which parameters it used. At its end the device is materialized once, and each bucket costs
one batched fetch and one batched send.
"""

from typing import Any, Callable, List, Optional, Sequence

import torch
from torch import Tensor

from .buckets import Bucket
from .host_staging import HostStaging

#: A batched fetch allocates host memory: at most this fraction of all gradients, or the largest
#: gradient.
FETCHED_PARTS = 5


class LazyStaging(HostStaging):
    """Average gradients through host memory at the end of backward.

    For lazy devices (XLA, T20), and for models that are spread over several devices of any kind:
    backward has a thread for each device, but all ranks have to start buckets in the same order.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._indices: Optional[List[int]] = None
        self._buckets: List[Bucket] = []
        self._begin_iteration()
        for index, parameter in enumerate(self.parameters):
            parameter.register_hook(lambda _, index=index: self._mark_used(index))

    def _finish(self) -> None:
        with torch.no_grad():
            # Nothing is fetched before backward has ended, so no gradient is fetched too early.
            used, _ = self._agree([False] * len(self.parameters))
            for bucket in self._divide(used):
                self._start(bucket)
            self._end_iteration(self._send_averages(used))

    def _divide(self, used: Sequence[bool]) -> List[Bucket]:
        """Divide the used gradients into buckets, which rarely change between iterations."""
        indices = [index for index, is_used in enumerate(used) if is_used]
        if indices != self._indices:
            if self._indices is not None:
                self._reset_compression()
            self._indices = indices
            self._buckets = self._layout.divide(indices)
        return self._buckets

    def _fetch(
        self, gradients: Sequence[Tensor], views: Sequence[Tensor]
    ) -> Optional[Callable[[], None]]:
        if not self.accelerator.lazy:
            return super()._fetch(gradients, views)
        limit, first, size = self._bytes // FETCHED_PARTS, 0, 0
        for end, view in enumerate(views):
            bytes_ = view.numel() * view.element_size()
            if size + bytes_ > limit and end > first:
                self.accelerator.copy_to_host(gradients[first:end], views[first:end])
                first, size = end, 0
            size += bytes_
        self.accelerator.copy_to_host(gradients[first:], views[first:])
        return None
