"""Average gradients through host memory: the base class for lazy and for eager devices."""

import threading
import time
from abc import ABC, abstractmethod
from typing import Any, Callable, Iterable, List, Optional, Sequence, Tuple

import torch
from torch import Tensor, distributed as torch_dist, nn

from mmdevplug.accelerators import Accelerator, devices_of
from mmdevplug.distributed.traffic import TRAFFIC, waiting
from mmdevplug.errors import ModelError
from mmdevplug.utils.pytree import tensors_in

from .buckets import Bucket, BucketLayout, numel_by_dtype
from .compression import Compression
from .nonfinite import FinitePolicy, names_of_nonfinite
from .reduction import Steps, make_reduction

#: Size of a message.
BUCKET_BYTES = 8 << 20


class BucketWork:
    """Average a bucket step by step, so that several buckets make progress at a time."""

    def __init__(self, bucket: Bucket, steps: Steps) -> None:
        self.bucket = bucket
        self.completed = False
        self.finite = True  # of the average, once completed
        self._steps = steps

    def advance(self) -> None:
        """Take one step."""
        try:
            next(self._steps)
        except StopIteration as end:
            self.completed = True
            self.finite = not end.value

    def wait(self) -> None:
        """Take all remaining steps."""
        while not self.completed:
            self.advance()


class HostStaging(ABC):
    """Average gradients over ranks through host memory.

    Subclasses decide when gradients are fetched. All ranks agree on the parameters that were used.
    A parameter that no rank used keeps ``.grad`` as it is. One that some ranks used counts as zero
    on the others, as under DDP with ``find_unused_parameters=True``.

    Attributes:
        finite (bool): Whether the last averages were finite, the same on all ranks. Always True
            if the policy is ``'ignore'`` and no gradient scaler is enabled.
    """

    def __init__(
        self,
        named_parameters: Sequence[Tuple[str, nn.Parameter]],
        accelerator: Accelerator,
        group: Any = None,
        bucket_bytes: Optional[int] = None,
        compression: Optional[Compression] = None,
        hierarchy: Any = 'auto',
        policy: Optional[FinitePolicy] = None,
        before: Optional['HostStaging'] = None,
    ) -> None:
        self.names = [name for name, _ in named_parameters]
        self.parameters = [parameter for _, parameter in named_parameters]
        self._ids = {id(parameter) for parameter in self.parameters}
        self.accelerator = accelerator
        # A model that is spread over several devices has parameters on all of them.
        self.devices = devices_of(self.parameters)
        self.group = group
        self.policy = FinitePolicy('stop', group) if policy is None else policy
        self.finite = True
        self._lock = threading.Lock()
        self._synchronize = False
        self._bytes = sum(p.numel() * p.element_size() for p in self.parameters)
        if before is not None:
            before.reduction.begin()
        # Host memory for all gradients is allocated once, in one piece for each dtype.
        self.reduction, self._memory = make_reduction(
            numel_by_dtype(self.parameters),
            group,
            compression,
            hierarchy,
            pin_memory=accelerator.pins_memory(),
            before=before and before.reduction,
        )
        self._layout = BucketLayout(
            self.parameters, self._memory, bucket_bytes or self._default_bucket_bytes()
        )
        self._divided: Optional[Tuple[List[int], List[Bucket]]] = None
        self._hooks: List[Any] = []  # on the parameters

    def take_over(self, before: 'HostStaging') -> None:
        """Stand in for an earlier staging, which may have seen gradients to be accumulated."""
        for hook in before._hooks:
            hook.remove()
        used = {id(p) for p, is_used in zip(before.parameters, before._used) if is_used}
        self._used = [id(parameter) in used for parameter in self.parameters]

    def _default_bucket_bytes(self) -> int:
        return BUCKET_BYTES

    def covers(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Return whether the gradients of all these parameters are averaged here."""
        return self._ids.issuperset(map(id, parameters))

    def prepare(self, outputs: Any, synchronize: bool) -> None:
        """Prepare for the backward pass that follows; it averages unless under ``no_sync``."""
        self._synchronize = synchronize
        self._queued = False
        if synchronize:
            # Not only hooks of parameters: these may run inside the inner backward of a
            # checkpointed segment, whose end is not the end of backward.
            for tensor in tensors_in(outputs):
                if tensor.requires_grad:
                    tensor.register_hook(self._queue_finish)

    def _queue_finish(self, _: Any = None) -> None:
        with self._lock:
            is_due = self._synchronize and not self._queued
            self._queued = self._queued or is_due
        if is_due:
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    @abstractmethod
    def _finish(self) -> None:
        """Average the remaining buckets at the end of backward, and send the averages back."""

    def _begin_iteration(self) -> None:
        self._used = [False] * len(self.parameters)
        self._works: List[BucketWork] = []
        self._queued = False
        self._before = self.reduction.sent, self.reduction.shared
        self._started = self._ended = self._busy = 0.0

    def _mark_used(self, index: int) -> None:
        self._used[index] = True
        self._queue_finish()

    def _agree(self, repeated: Sequence[bool]) -> Tuple[List[bool], List[bool]]:
        """Return which parameters any rank used, and which gradients any fetched too early."""
        flags = torch.tensor([self._used, repeated], dtype=torch.int32)
        agreed = torch_dist.all_reduce(flags, group=self.group, async_op=True)
        gradients = [p.grad for p, here in zip(self.parameters, self._used) if here]
        # The all-reduce runs while a lazy device computes.
        self.accelerator.materialize_all(self.devices, gradients)
        with waiting('gradients'):
            agreed.wait()
        used, repeated = (flags > 0).tolist()
        return used, repeated

    def _divide(self, indices: List[int], after: Sequence[Bucket] = ()) -> List[Bucket]:
        """Divide these gradients into buckets, which rarely change between iterations."""
        if self._divided is None or self._divided[0] != indices:
            if self._divided is not None:
                self._reset_compression()
            self._divided = indices, self._layout.divide(indices, after)
        return self._divided[1]

    def _start(self, bucket: Bucket) -> None:
        """Fetch a bucket and start to average it, and advance the others by one step."""
        if not self._works:
            self.reduction.begin()
            self._started = time.perf_counter()
        here = [place for place, index in enumerate(bucket.indices) if self._used[index]]
        gradients = [self._dense_gradient(bucket.indices[place]) for place in here]
        if len(here) < len(bucket.indices):
            bucket.flat.zero_()
        wait_for_copies = self._fetch(gradients, [bucket.views[place] for place in here])
        begin = time.perf_counter()
        self._works.append(BucketWork(bucket, self._average(bucket, wait_for_copies)))
        for work in self._works:
            if not work.completed:
                work.advance()
        self._busy += time.perf_counter() - begin

    def _dense_gradient(self, index: int) -> Tensor:
        gradient = self.parameters[index].grad
        if gradient.is_sparse:
            raise ModelError(
                f'parameter {self.names[index]!r} has a sparse gradient, which cannot be '
                f'averaged through the host; build its module with sparse=False.'
            )
        return gradient

    def _fetch(
        self, gradients: Sequence[Tensor], views: Sequence[Tensor]
    ) -> Optional[Callable[[], None]]:
        """Start to copy gradients to the host; returns a function that waits for the copies."""
        return self.accelerator.start_copy_to_host(gradients, views)

    def _average(self, bucket: Bucket, wait_for_copies: Optional[Callable[[], None]]) -> Steps:
        if wait_for_copies is not None:
            yield
            wait_for_copies()
        check = self.policy.active or self.policy.suspended
        return (yield from self.reduction.average(bucket, check))

    def _complete(self, work: BucketWork) -> None:
        begin = time.perf_counter()
        work.wait()
        self._ended = time.perf_counter()
        self._busy += self._ended - begin

    def _send_averages(self, used: Sequence[bool]) -> List[Bucket]:
        """Send the averages to the device, and return the buckets that are not finite.

        Those are not sent, so the device still has this rank's own gradients.
        """
        nonfinite = []
        for work in self._works:
            self._complete(work)
            # A gradient scaler checks the averages on the device.
            if work.finite or self.policy.suspended:
                self._send(work.bucket, used)
            else:
                nonfinite.append(work.bucket)
        return nonfinite

    def _send(self, bucket: Bucket, used: Sequence[bool]) -> None:
        sources, targets = [], []
        for index, view in zip(bucket.indices, self.reduction.results(bucket)):
            if not used[index]:
                continue
            parameter = self.parameters[index]
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            sources.append(view)
            targets.append(parameter.grad)
        self.accelerator.copy_to_device(sources, targets)

    def _end_iteration(self, nonfinite: Sequence[Bucket]) -> None:
        """Release the host memory for the next iteration, and apply the policy for NaN."""
        self.finite = all(work.finite for work in self._works)
        self.reduction.end()
        found = names_of_nonfinite(self._own_gradients(nonfinite))
        if self._works:
            TRAFFIC.record(
                'gradients',
                sent=self.reduction.sent - self._before[0],
                shared=self.reduction.shared - self._before[1],
                seconds=self._ended - self._started,
                waited=self._busy,
                messages=len(self._works),
            )
        self._begin_iteration()
        if nonfinite:
            self.policy.apply(found)
            # An optimizer skips parameters without a gradient, with momentum and decay.
            for parameter in self.parameters:
                parameter.grad = None
            self._reset_compression()

    def _own_gradients(self, buckets: Sequence[Bucket]) -> List[Tuple[str, Tensor]]:
        """Fetch this rank's own gradients of buckets that were not sent, with their names."""
        indices = [i for bucket in buckets for i in bucket.indices if self._used[i]]
        fetched = self.accelerator.to_host([self.parameters[i].grad for i in indices])
        return [(self.names[i], gradient) for i, gradient in zip(indices, fetched)]

    def _reset_compression(self) -> None:
        if self.reduction.compression is not None:
            self.reduction.compression.reset()
