"""Average the buckets of PyTorch's DDP: compress, check for NaN, and count bytes."""

import time
from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch
from torch import Tensor, distributed as torch_dist, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from mmdevplug.distributed.traffic import TRAFFIC, all_reduce_bytes

from .buckets import Bucket
from .compression import Compression, HalfCompression
from .nonfinite import (
    FinitePolicy,
    is_marked_nonfinite,
    mark_nonfinite,
    names_of_nonfinite,
    scale_and_check,
)

_HALF_HOOKS = {torch.float16: 'fp16_compress_hook', torch.bfloat16: 'bf16_compress_hook'}


class BucketAveraging:
    """Average buckets, as a communication hook of PyTorch's DDP.

    To compress to half precision, PyTorch's hook is used where the backend adds up that dtype.
    """

    def __init__(
        self,
        named_parameters: Sequence[Tuple[str, nn.Parameter]],
        group: Any,
        compression: Optional[Compression],
        policy: FinitePolicy,
    ) -> None:
        self.group = group
        self.world_size = torch_dist.get_world_size(group)
        self.compression = compression
        self.policy = policy
        self._parameters = [parameter for _, parameter in named_parameters]
        self._names: Dict[int, str] = {id(parameter): name for name, parameter in named_parameters}
        self._half_hook = self._find_half_hook()
        self._begin_iteration()

    def _find_half_hook(self) -> Any:
        if not isinstance(self.compression, HalfCompression):
            return None
        dtype = self.compression.dtype
        device = self._parameters[0].device
        try:
            torch_dist.all_reduce(torch.zeros(1, dtype=dtype, device=device), group=self.group)
        except RuntimeError:
            return None  # gloo of this release does not add up this dtype; ours is used.
        return getattr(default_hooks, _HALF_HOOKS[dtype], None)

    def _begin_iteration(self) -> None:
        self._in_iteration = False
        self._found: List[str] = []
        self._not_finite = False
        self._messages = 0
        self._sent = self._shared = 0.0
        self._started = self._last_started = self._completed = 0.0

    # Without annotations: DDP accepts only those of its release.
    def hook(self, state, bucket):
        """Average a bucket; returns a future."""
        self._enter_iteration()
        flat = bucket.buffer()
        compressible = flat.dtype == torch.float32 and not flat.is_sparse
        scaled_by_hook = self._half_hook is not None and compressible
        self._scale(bucket, 1.0 if scaled_by_hook else 1 / self.world_size)
        self._messages += 1
        average = self._half_hook if scaled_by_hook else self._average
        future = average(self.group, bucket).then(lambda done: self._complete(done.value()))
        self._last_started = time.perf_counter()
        if scaled_by_hook:
            self._sent += all_reduce_bytes(flat.numel() * 2, self.world_size)
        return future

    def _enter_iteration(self) -> None:
        if self._in_iteration:
            return
        try:
            torch.autograd.Variable._execution_engine.queue_callback(self._wait_for_ddp)
        except RuntimeError:
            return  # no backward: a rank that has left DDP's `join` answers the others
        self._in_iteration = True
        self._started = time.perf_counter()

    def _scale(self, bucket: Any, factor: float) -> None:
        flat = bucket.buffer()
        if self.policy.active and flat.is_floating_point():
            if scale_and_check(flat, factor):
                # A sparse gradient is a separate bucket, without a list of its parts.
                gradients = [flat] if flat.is_sparse else bucket.gradients()
                named = zip(bucket.parameters(), gradients)
                self._found += names_of_nonfinite([(self._names[id(p)], g) for p, g in named])
                mark_nonfinite(flat)
        elif factor != 1.0:
            flat.mul_(factor)

    def _average(self, group: Any, bucket: Any) -> Any:
        flat = bucket.buffer()
        if self.compression is None or flat.dtype != torch.float32 or flat.is_sparse:
            self._sent += self._bytes_without_compression(flat)
            work = torch_dist.all_reduce(flat, group=group, async_op=True)
            return work.get_future().then(lambda done: done.value()[0])
        in_host_memory = Bucket(flat, bucket.gradients(), bucket.index())
        self._sent += _run(self.compression.all_reduce(in_host_memory, group))
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(flat)
        return future

    def _bytes_without_compression(self, flat: Tensor) -> float:
        if not flat.is_sparse:
            return all_reduce_bytes(flat.numel() * flat.element_size(), self.world_size)
        # gloo gathers the indices and the values of all ranks, and each adds them up.
        stored = (flat._indices(), flat._values())
        return (self.world_size - 1) * sum(part.numel() * part.element_size() for part in stored)

    def _complete(self, flat: Tensor) -> Tensor:
        self._completed = time.perf_counter()
        if self.policy.active:
            overflows = self._half_hook is not None and self.compression.dtype == torch.float16
            if is_marked_nonfinite(flat) or (overflows and scale_and_check(flat, 1.0)):
                self._not_finite = True
        return flat

    def _wait_for_ddp(self) -> None:
        # After DDP's own callback, queued by now, which copies the averages to the gradients.
        torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _finish(self) -> None:
        TRAFFIC.record(
            'gradients',
            sent=self._sent,
            shared=self._shared,
            seconds=self._completed - self._started,
            waited=max(0.0, self._completed - self._last_started),
            messages=self._messages,
        )
        found, not_finite = self._found, self._not_finite
        self._begin_iteration()
        if not_finite:
            self.policy.apply(found)
            for parameter in self._parameters:
                parameter.grad = None
            if self.compression is not None:
                self.compression.reset()


def _run(steps: Any) -> float:
    """Run a generator to its end and return its value."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value
