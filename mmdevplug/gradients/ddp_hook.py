"""Average the buckets of PyTorch's DDP: compress them, and check for NaN."""

from contextlib import suppress
from typing import Any, List, Sequence, Tuple

import torch
from torch import Tensor, distributed as torch_dist, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from mmdevplug.distributed.nonfinite import (
    FinitePolicy,
    is_marked_nonfinite,
    mark_nonfinite,
    names_of_nonfinite,
    scale_and_check,
)


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
        names, parameters = zip(*named_parameters)
        self._names = dict(zip(map(id, parameters), names))
        self._in_iteration = self._not_finite = False
        self._found: List[str] = []
        # Buckets that are averaged on the host: the work, what DDP waits for, and parameters with
        # their gradients if NaN matters.
        self._started: List[Tuple[Any, Tensor, torch.futures.Future, Any]] = []

    # Without annotations: DDP accepts only those of its release.
    def hook(self, state, bucket):
        """Average a bucket; returns a future."""
        if not self._in_iteration:
            self._found, self._started, self._not_finite = [], [], False
            # A rank in DDP's join() runs this hook outside of backward, where no callback can be
            # queued.
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
        named = list(zip(bucket.parameters(), bucket.gradients())) if watched else None
        future: Any = torch.futures.Future()
        if self._in_iteration:
            self._started.append((work, flat, future, named))
        if self._waits_inside or not self._in_iteration:
            return work.get_future().then(lambda _: flat)
        return future

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
        for work, flat, future, named in self._started:
            work.wait()
            if not self._waits_inside:
                future.set_result(flat)
            if named is not None and not work.finite:
                self._not_finite = True
                self._found += names_of_nonfinite([(self._names[id(p)], own) for p, own in named])
        # After DDP's own callback, queued by now, which copies the averages to the gradients.
        torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _finish(self) -> None:
        self._in_iteration, self._started = False, []
        if self._not_finite:
            order = list(self._names.values())
            self.policy.stop(sorted(self._found, key=lambda told: order.index(told.split(' ')[0])))
