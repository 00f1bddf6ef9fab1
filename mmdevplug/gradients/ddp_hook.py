"""Average the buckets of PyTorch's DDP: compress them, and check for NaN."""

from contextlib import suppress
from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

import torch
from torch import Tensor, distributed as torch_dist, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

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
    its own thread. To compress, PyTorch's hook is used.
    """

    def __init__(
        self,
        named_parameters: Sequence[Tuple[str, nn.Parameter]],
        group: Any,
        compress: bool,
        policy: FinitePolicy,
        waits_inside: bool = False,
    ) -> None:
        self.group = group
        self.world_size = group.size()
        self.compress = compress
        self.policy = policy
        # DDP does, in the first iteration of a graph that it takes for static.
        self._waits_inside = waits_inside
        self._names: Dict[int, str] = {id(parameter): name for name, parameter in named_parameters}
        self._begin_iteration()

    def _begin_iteration(self) -> None:
        self._in_iteration = False
        self._found: List[str] = []
        self._not_finite = False
        self._started: List[_Started] = []

    # Without annotations: DDP accepts only those of its release.
    def hook(self, state, bucket):
        """Average a bucket; returns a future."""
        if not self._in_iteration:
            # Without a backward, a rank that has left DDP's `join` answers the others.
            with suppress(RuntimeError):
                torch.autograd.Variable._execution_engine.queue_callback(self._wait_for_ddp)
                self._in_iteration = True
        flat = bucket.buffer()
        plain = flat.is_floating_point() and not flat.is_sparse
        if plain and not self.compress and hasattr(self.group, 'average'):  # of `staged`
            return self._average_on_host(bucket, flat)
        compressible = self.compress and flat.dtype == torch.float32 and plain
        # PyTorch's hook divides by itself.
        self._scale(bucket, 1.0 if compressible else 1 / self.world_size)
        if compressible:
            future = default_hooks.bf16_compress_hook(self.group, bucket)
        else:
            work = torch_dist.all_reduce(flat, group=self.group, async_op=True)
            future = work.get_future().then(lambda done: done.value()[0])
        return future.then(lambda done: self._complete(done.value()))

    def _average_on_host(
        self, bucket: 'torch_dist.GradBucket', flat: Tensor
    ) -> torch.futures.Future:
        watched = self.policy.active and self._in_iteration
        work = self.group.average(flat, keeps_nonfinite=watched)
        named = list(zip(bucket.parameters(), bucket.gradients())) if watched else []
        started = _Started(work, flat, torch.futures.Future(), watched, named)
        if self._waits_inside or not self._in_iteration:
            future = work.get_future().then(lambda _: flat)
            if self._in_iteration:
                self._started.append(started)
            return future
        self._started.append(started)
        return started.future

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

    def _complete(self, flat: Tensor) -> Tensor:
        if self.policy.active and is_marked_nonfinite(flat):
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
        # After DDP's own callback, queued by now, which copies the averages to the gradients.
        torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _finish(self) -> None:
        found, not_finite = self._found, self._not_finite
        self._begin_iteration()
        if not_finite:
            order = list(self._names.values())
            self.policy.stop(sorted(found, key=lambda text: order.index(text.split(' ')[0])))
