"""Average the buckets of PyTorch's DDP: compress, check for NaN, and count bytes."""

import time
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor, distributed as torch_dist, nn

from mmdevplug.distributed.traffic import TRAFFIC, all_reduce_bytes
from mmdevplug.errors import ModelError, first_line
from mmdevplug.staged.staged_group import StagedProcessGroup

from .buckets import HostBucket
from .compression import HALVES, Compression, PowerSGD, half_hook
from .nonfinite import (
    FinitePolicy,
    is_marked_nonfinite,
    mark_nonfinite,
    names_of_nonfinite,
    scale_and_check,
)


class _Started(NamedTuple):
    """A bucket that is averaged on the host, and what DDP waits for."""

    work: Any
    flat: Tensor
    future: torch.futures.Future
    watched: bool  # whether NaN matters
    named: List[Tuple[nn.Parameter, Tensor]]  # parameters and gradients, if it does


class BucketAveraging:
    """Average buckets, as a communication hook of PyTorch's DDP.

    On a group that averages on the host, the backward pass waits for all buckets at its end, in
    its own thread. To compress, PyTorch's hooks are used.
    """

    def __init__(
        self,
        named_parameters: Sequence[Tuple[str, nn.Parameter]],
        group: Any,
        compression: Optional[Compression],
        policy: FinitePolicy,
        waits_inside: bool = False,
    ) -> None:
        self.group = group
        self.world_size = group.size()
        self.compression = compression
        self.policy = policy
        # DDP does, in the first iteration of a graph that it takes for static.
        self._waits_inside = waits_inside
        self._parameters = [parameter for _, parameter in named_parameters]
        self._names: Dict[int, str] = {id(parameter): name for name, parameter in named_parameters}
        if isinstance(compression, str):
            self._check_half(compression)
        self._begin_iteration()

    def _check_half(self, kind: str) -> None:
        """Refuse a type that the backend does not add up, in a collective of all ranks."""
        device = self._parameters[0].device
        try:
            torch_dist.all_reduce(
                torch.zeros(1, dtype=HALVES[kind], device=device), group=self.group
            )
        except RuntimeError as error:
            raise ModelError(
                f'model_wrapper_cfg.grad_compression={kind!r}: the backend of the process group '
                f'does not add up {HALVES[kind]} on {device} ({first_line(error)}). Set '
                f"grad_compression='none' or 'powersgd'."
            ) from error

    def _begin_iteration(self) -> None:
        self._in_iteration = False
        self._found: List[str] = []
        self._not_finite = False
        self._messages = 0
        self._sent = 0.0
        self._begun = self._last_begun = self._completed = 0.0
        self._started: List[_Started] = []
        self._before = self._exchanged()

    def _exchanged(self) -> Tuple[int, int]:
        on_host = isinstance(self.group, StagedProcessGroup)
        return self.group.large.exchanged() if on_host else (0, 0)

    # Without annotations: DDP accepts only those of its release.
    def hook(self, state, bucket):
        """Average a bucket; returns a future."""
        self._enter_iteration()
        self._messages += 1
        flat = bucket.buffer()
        plain = flat.is_floating_point() and not flat.is_sparse
        if plain and self.compression is None and isinstance(self.group, StagedProcessGroup):
            return self._average_on_host(bucket, flat)
        compressible = self.compression is not None and flat.dtype == torch.float32 and plain
        # PyTorch's hooks divide by themselves.
        self._scale(bucket, 1.0 if compressible else 1 / self.world_size)
        if compressible:
            future = self._compress(bucket)
        else:
            self._sent += self._bytes_of(flat)
            work = torch_dist.all_reduce(flat, group=self.group, async_op=True)
            future = work.get_future().then(lambda done: done.value()[0])
        self._last_begun = time.perf_counter()
        return future.then(lambda done: self._complete(done.value()))

    def _enter_iteration(self) -> None:
        if self._in_iteration:
            return
        try:
            torch.autograd.Variable._execution_engine.queue_callback(self._wait_for_ddp)
        except RuntimeError:
            return  # no backward: a rank that has left DDP's `join` answers the others
        self._in_iteration = True
        self._begun = time.perf_counter()

    def _average_on_host(
        self, bucket: 'torch_dist.GradBucket', flat: Tensor
    ) -> torch.futures.Future:
        watched = self.policy.active and self._in_iteration
        work = self.group.average(flat, keeps_nonfinite=watched)
        if not work.shared:
            self._sent += self._bytes_of(flat)
        self._last_begun = time.perf_counter()
        named = list(zip(bucket.parameters(), bucket.gradients())) if watched else []
        started = _Started(work, flat, torch.futures.Future(), watched, named)
        if self._waits_inside or not self._in_iteration:
            future = work.get_future().then(lambda _: flat)
            if self._in_iteration:
                self._started.append(started)
            return future
        self._started.append(started)
        return started.future

    def _compress(self, bucket: 'torch_dist.GradBucket') -> torch.futures.Future:
        flat = bucket.buffer()
        if isinstance(self.compression, PowerSGD):
            # Waits at once: the hook starts collectives when others end, so with several buckets
            # in progress their order would differ between ranks.
            in_parts = HostBucket(flat, bucket.gradients(), bucket.index())
            result, sent = self.compression.bytes_of(
                flat.numel(),
                self.world_size,
                lambda: self.compression.average(self.group, in_parts).wait(),
            )
            self._sent += sent
            future: torch.futures.Future = torch.futures.Future()
            future.set_result(result)
            return future
        self._sent += all_reduce_bytes(flat.numel() * 2, self.world_size)
        return half_hook(self.compression)(self.group, bucket)

    def _scale(self, bucket: 'torch_dist.GradBucket', factor: float) -> None:
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

    def _bytes_of(self, flat: Tensor) -> float:
        """Bytes that this rank sends for a bucket."""
        if not flat.is_sparse:
            return all_reduce_bytes(flat.numel() * flat.element_size(), self.world_size)
        # gloo gathers the indices and the values of all ranks, and each adds them up.
        stored = (flat._indices(), flat._values())
        return (self.world_size - 1) * sum(part.numel() * part.element_size() for part in stored)

    def _complete(self, flat: Tensor) -> Tensor:
        self._completed = time.perf_counter()
        if self.policy.active:
            overflows = self.compression == 'fp16'
            if is_marked_nonfinite(flat) or (overflows and scale_and_check(flat, 1.0)):
                self._not_finite = True
        return flat

    def _wait_for_ddp(self) -> None:
        # Before DDP's own callback, which waits for the futures.
        for started in self._started:
            started.work.wait()
            if not self._waits_inside:
                started.future.set_result(started.flat)
            if started.watched and not started.work.finite:
                self._not_finite = True
                named = [(self._names[id(p)], own) for p, own in started.named]
                self._found += names_of_nonfinite(named)
        if self._started:
            self._completed = time.perf_counter()
        # After DDP's own callback, queued by now, which copies the averages to the gradients.
        torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _finish(self) -> None:
        sent, shared = (now - then for then, now in zip(self._before, self._exchanged()))
        TRAFFIC.record(
            'gradients',
            sent=self._sent + sent,
            shared=shared,
            seconds=self._completed - self._begun,
            waited=max(0.0, self._completed - self._last_begun),
            messages=self._messages,
        )
        found, not_finite = self._found, self._not_finite
        self._begin_iteration()
        if not_finite:
            order = list(self._names.values())
            self.policy.apply(sorted(found, key=lambda text: order.index(text.split(' ')[0])))
            for parameter in self._parameters:
                parameter.grad = None
            if isinstance(self.compression, PowerSGD):
                self.compression.reset()
