"""Average gradients through host memory: what lazy and eager devices have in common."""

import threading
import time
from abc import ABC, abstractmethod
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Tuple

import torch
from torch import Tensor, distributed as torch_dist, nn

from mmdevplug.accelerators import Accelerator, devices_of
from mmdevplug.distributed.traffic import TRAFFIC
from mmdevplug.errors import ModelError
from mmdevplug.utils.pytree import tensors_in

from .buckets import Bucket, BucketLayout, numel_by_dtype
from .compression import Compression
from .nonfinite import FinitePolicy, names_of_nonfinite
from .reduction import Reduction, Steps, make_reduction

#: Size of a message.
BUCKET_BYTES = 8 << 20


class BucketWork:
    """Average a bucket step by step, so that several buckets make progress at a time.

    Args:
        bucket (Bucket): This rank's gradients.
        steps (Generator): See :meth:`mmdevplug.gradients.reduction.Reduction.average`.

    Attributes:
        completed (bool): Whether the average is in place.
        finite (bool): Whether the average consists of finite values; known once completed.
    """

    def __init__(self, bucket: Bucket, steps: Steps) -> None:
        self.bucket = bucket
        self.completed = False
        self.finite = True
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

    Args:
        named_parameters (Sequence[Tuple[str, nn.Parameter]]): Those that require gradients, each
            once, in the same order on every rank.
        accelerator (Accelerator): Copies between device and host.
        group (ProcessGroup, optional): Defaults to None: all ranks.
        bucket_bytes (int, optional): Size of a message. Defaults to None: 8 MB, and where buckets
            overlap with backward no more than an eighth of all gradients.
        compression (Compression, optional): What is sent instead of the values. Defaults to None.
        hierarchy (str or bool): See :func:`mmdevplug.gradients.reduction.make_reduction`.
        policy (FinitePolicy, optional): What to do about NaN. Defaults to None: ``'stop'``.

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
        self.reduction, self._memory = self._allocate(compression, hierarchy)
        self._layout = BucketLayout(
            self.parameters, self._memory, bucket_bytes or self._default_bucket_bytes()
        )

    def _default_bucket_bytes(self) -> int:
        return BUCKET_BYTES

    def _allocate(
        self, compression: Optional[Compression], hierarchy: Any
    ) -> Tuple[Reduction, Dict[torch.dtype, Tensor]]:
        """Allocate host memory for all gradients, once; one piece for each dtype."""
        sizes = numel_by_dtype(self.parameters)
        pin_memory = self.accelerator.pins_memory()
        reduction = make_reduction(self.group, compression, hierarchy, pin_memory)
        memory = reduction.allocate(sizes)
        if memory is None:  # The ranks of a host cannot share memory.
            reduction = make_reduction(self.group, compression, False, pin_memory)
            memory = reduction.allocate(sizes)
        return reduction, memory

    def covers(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Tell whether the gradients of all these parameters are averaged here."""
        return self._ids.issuperset(map(id, parameters))

    def prepare(self, outputs: Any, synchronize: bool) -> None:
        """Prepare for the backward pass that follows a forward pass.

        Args:
            outputs: What the module returned. A hook on its tensors starts the averaging, because
                the hooks of parameters may run inside the inner backward of a checkpointed
                segment, whose end is not the end of backward.
            synchronize (bool): Whether backward averages; False under ``no_sync``.
        """
        self._synchronize = synchronize
        self._queued = False
        if synchronize:
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
        """Average what backward left, and send the averages to the device."""

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
        """Agree with all ranks on how parameters were used.

        Args:
            repeated (Sequence[bool]): Parameters whose gradients were fetched too early here.

        Returns:
            Tuple[List[bool], List[bool]]: Parameters that any rank used, and parameters whose
            gradients any rank fetched too early.
        """
        flags = torch.tensor([self._used, repeated], dtype=torch.int32)
        agreed = torch_dist.all_reduce(flags, group=self.group, async_op=True)
        gradients = [p.grad for p, here in zip(self.parameters, self._used) if here]
        # The message travels while a lazy device works.
        self.accelerator.materialize_all(self.devices, gradients)
        agreed.wait()
        used, repeated = (flags > 0).tolist()
        return used, repeated

    def _start(self, bucket: Bucket) -> None:
        """Fetch a bucket and start to average it, and advance the others by one step."""
        if not self._works:
            self.reduction.begin()
            self._started = time.perf_counter()
        here = [place for place, index in enumerate(bucket.indices) if self._used[index]]
        gradients = [self._dense_gradient(bucket.indices[place]) for place in here]
        if len(here) < len(bucket.indices):
            bucket.flat.zero_()
        copied = self._fetch(gradients, [bucket.views[place] for place in here])
        begin = time.perf_counter()
        self._works.append(BucketWork(bucket, self._average(bucket, copied)))
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

    def _average(self, bucket: Bucket, copied: Optional[Callable[[], None]]) -> Steps:
        if copied is not None:
            yield
            copied()
        check = self.policy.active or self.policy.suspended
        return (yield from self.reduction.average(bucket, check))

    def _complete(self, work: BucketWork) -> None:
        begin = time.perf_counter()
        work.wait()
        self._ended = time.perf_counter()
        self._busy += self._ended - begin

    def _send_averages(self, used: Sequence[bool]) -> List[Bucket]:
        """Wait for the averages and send them to the device.

        Returns:
            List[Bucket]: Those that are not finite. They are not sent, so the device still has
            this rank's own gradients.
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
        """Release the host memory for the next iteration, and apply the policy for NaN.

        Args:
            nonfinite (Sequence[Bucket]): What :meth:`_send_averages` returned.
        """
        self.finite = all(work.finite for work in self._works)
        self.reduction.end()
        found = names_of_nonfinite(self._own_gradients(nonfinite))
        self._record_traffic()
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

    def _record_traffic(self) -> None:
        if self._works:
            TRAFFIC.record(
                'gradients',
                sent=self.reduction.sent - self._before[0],
                shared=self.reduction.shared - self._before[1],
                seconds=self._ended - self._started,
                waited=self._busy,
                messages=len(self._works),
            )
