"""Average gradients through host memory at the end of backward.

On a lazy device every copy during backward costs an execution of the graph. So backward only
records which parameters it used. At its end the device is materialized once, and each bucket costs
one batched fetch and one batched send.
"""

from typing import Any, Callable, Optional, Sequence

import torch
from torch import Tensor

from mmdevplug.distributed.byte_exchange import group_by_bytes

from .host_staging import BUCKET_BYTES, HostStaging

#: A batched fetch allocates host memory: at most this, or one gradient, so that it is still in the
#: processor's cache when it is copied on.
FETCH_BYTES = 2 << 20


class LazyStaging(HostStaging):
    """Average gradients through host memory at the end of backward.

    For lazy devices (XLA, T20), and for models that are spread over several devices of any kind:
    backward has a thread for each device, but all ranks have to start buckets in the same order.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._begin_iteration()
        self._hooks = [
            parameter.register_hook(lambda _, index=index: self._mark_used(index))
            for index, parameter in enumerate(self.parameters)
        ]

    def _default_bucket_bytes(self) -> int:
        # All buckets wait for backward, so a small last one hides nothing and costs its barriers.
        return -(-self._bytes // max(1, round(self._bytes / BUCKET_BYTES)))

    def _finish(self) -> None:
        with torch.no_grad():
            # Nothing is fetched before backward has ended, so no gradient is fetched too early.
            used, _ = self._agree([False] * len(self.parameters))
            for bucket in self._divide([index for index, is_used in enumerate(used) if is_used]):
                self._start(bucket)
            self._end_iteration(self._send_averages(used))

    def _fetch(
        self, gradients: Sequence[Tensor], views: Sequence[Tensor]
    ) -> Optional[Callable[[], None]]:
        if not self.accelerator.lazy:
            return super()._fetch(gradients, views)
        first = 0
        for part in group_by_bytes(views, FETCH_BYTES):
            self.accelerator.copy_to_host(gradients[first : first + len(part)], part)
            first += len(part)
        return None
