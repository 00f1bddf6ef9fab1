"""Averaging gradients through the host, for devices whose tensors the backend refuses.

The figures that shaped this: on a lazy device every copy made during backward costs a graph
execution, so nothing is touched until backward has ended. Then there is one materialization, and
for each bucket one batched fetch, one average on the host and one batched send, several buckets
at a time. On an eager device a bucket sets off as soon as backward has filled it.
"""

import threading
import time
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Set, Tuple

import torch
from torch import Tensor, distributed as torch_dist, nn

from mmdevplug.accelerators import Accelerator, devices_of
from mmdevplug.distributed.traffic import TRAFFIC
from mmdevplug.errors import ModelError
from mmdevplug.utils.pytree import tensors_in

from .compression import Bucket, Compression
from .nonfinite import FinitePolicy, names_of_nonfinite
from .reduction import Reduction, Steps, make_reduction

#: A message on a lazy device, where all gradients are there at the same time.
BUCKET_BYTES = 8 << 20
#: On an eager device a bucket is an eighth of all gradients, but no less than this, so that most
#: of them set off before backward ends.
BUCKET_PARTS = 8
LEAST_BUCKET_BYTES = 256 << 10
#: What a lazy device fetches at a time needs host memory for a moment: at most this part of all
#: gradients, or the largest of them.
FETCHED_PARTS = 5

#: Half precision is summed in float32: gloo of older releases lacks it, and it loses bits.
_SUMMED_IN = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


class Flight:
    """A bucket on its way.

    Args:
        bucket (Bucket): Its gradients.
        steps (Generator): What there is to do.

    Attributes:
        landed (bool): Whether the average is in place.
        finite (bool): Whether it consists of finite values; known when it has landed.
    """

    def __init__(self, bucket: Bucket, steps: Steps) -> None:
        self.bucket = bucket
        self.landed = False
        self.finite = True
        self._steps = steps

    def advance(self) -> None:
        """Take one step."""
        try:
            next(self._steps)
        except StopIteration as end:
            self.landed = True
            self.finite = not end.value

    def land(self) -> None:
        """Take all steps that are left."""
        while not self.landed:
            self.advance()


class GradientStaging:
    """Averages gradients over ranks.

    Which parameters were used travels too; a parameter that no rank used costs nothing once that
    is known, and one that some ranks used counts as zero on the others, as under DDP with
    ``find_unused_parameters=True``.

    Args:
        named_parameters (Sequence[Tuple[str, nn.Parameter]]): Those that require gradients, each
            once, in the same order on every rank.
        accelerator (Accelerator): Copies between device and host.
        group (ProcessGroup, optional): Defaults to None: all ranks.
        bucket_bytes (int, optional): Size of a message. Defaults to None: 8 MB, and on an eager
            device no more than an eighth of all gradients.
        compression (Compression, optional): What is sent instead of the values. Defaults to None.
        hierarchy (str or bool): See :func:`mmdevplug.gradients.reduction.make_reduction`.
        policy (FinitePolicy, optional): What to do about NaN. Defaults to None: ``'stop'``.
        overlap (bool, optional): Whether buckets set off during backward. Defaults to None: on
            eager devices, unless the model is spread over several.

    Attributes:
        finite (bool): Whether the last averages were finite, the same on all ranks; looked for
            unless the policy is ``'ignore'`` and no gradient scaler is in charge.
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
        overlap: Optional[bool] = None,
    ) -> None:
        self.names = [name for name, _ in named_parameters]
        self.parameters = [parameter for _, parameter in named_parameters]
        self._ids = {id(parameter) for parameter in self.parameters}
        self.accelerator = accelerator
        # A model that is spread over several devices has parameters on all of them.
        self.devices = devices_of(self.parameters)
        self.group = group
        self.policy = FinitePolicy('stop', group) if policy is None else policy
        # Backward has a thread for each device, and buckets set off in one order.
        eager = not accelerator.lazy and len(self.devices) == 1
        self.overlap = eager if overlap is None else overlap
        self._lock = threading.Lock()
        self._bytes = sum(p.numel() * p.element_size() for p in self.parameters)
        self.bucket_bytes = bucket_bytes or self._default_bucket_bytes()
        self.reduction, self._memory = self._allocate(compression, hierarchy)
        count = len(self.parameters)
        # Backward reaches the last parameters first.
        self._plan = list(reversed(range(count))) if self.overlap else []
        self._set_buckets()
        self._late: Dict[Tuple[int, ...], List[Bucket]] = {}
        self._repeating = [False] * count
        self._armed = False
        self.finite = True
        self._begin_iteration()
        # Nodes of the autograd graph live only as long as somebody holds them.
        self._nodes = [self._watch(index) for index in range(count)]

    def _default_bucket_bytes(self) -> int:
        if not self.overlap:
            return BUCKET_BYTES
        return max(LEAST_BUCKET_BYTES, min(BUCKET_BYTES, self._bytes // BUCKET_PARTS))

    def _allocate(
        self, compression: Optional[Compression], hierarchy: Any
    ) -> Tuple[Reduction, Dict[torch.dtype, Tensor]]:
        """Host memory for all gradients, allocated once; one piece for each dtype."""
        sizes: Dict[torch.dtype, int] = {}
        for parameter in self.parameters:
            dtype = _dtype_on_the_wire(parameter)
            sizes[dtype] = sizes.get(dtype, 0) + _numel_on_the_wire(parameter)
        pin_memory = self.accelerator.pins_memory()
        reduction = make_reduction(self.group, compression, hierarchy, pin_memory)
        memory = reduction.allocate(sizes)
        if memory is None:  # The ranks of a host cannot share memory.
            reduction = make_reduction(self.group, compression, False, pin_memory)
            memory = reduction.allocate(sizes)
        return reduction, memory

    def covers(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether all of these parameters are among those whose gradients are averaged here."""
        return self._ids.issuperset(map(id, parameters))

    # when ---------------------------------------------------------------------------------------

    def _watch(self, index: int) -> Any:
        """Learn of each gradient: on an eager device when it is complete, else when it begins."""
        parameter = self.parameters[index]
        if not self.overlap:
            return parameter.register_hook(lambda _: self._mark_used(index))
        node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
        node.register_hook(lambda *_: self._mark_complete(index))
        return node

    def prepare(self, outputs: Any, synchronize: bool) -> None:
        """Tell of a forward pass: the backward that follows averages, or only accumulates.

        Args:
            outputs: What the module returned. A hook on its tensors starts the averaging, because
                the hooks of parameters may run inside the inner backward of a checkpointed
                segment, whose end is not the end of backward.
            synchronize (bool): False under ``no_sync``.
        """
        self._armed = synchronize
        self._queued = False
        if synchronize:
            for tensor in tensors_in(outputs):
                if tensor.requires_grad:
                    tensor.register_hook(self._queue)

    def _queue(self, _: Any = None) -> None:
        with self._lock:
            is_due = self._armed and not self._queued
            self._queued = self._queued or is_due
        if is_due:
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _mark_used(self, index: int) -> None:
        self._used[index] = True
        self._queue()

    def _mark_complete(self, index: int) -> None:
        """Count a gradient that backward has added to ``.grad``, and let full buckets go."""
        self._mark_used(index)
        if not self._armed:
            return
        if self._seen[index]:
            # Another part of the gradient, so that the first has perhaps set off too early.
            self._repeats[index] = True
            return
        self._seen[index] = True
        if index not in self._bucket_of:
            return
        self._missing[self._bucket_of[index]] -= 1
        with torch.no_grad():
            # All ranks send buckets in the same order, whatever order they are filled in.
            for bucket in self._buckets[len(self._flights) :]:
                if self._missing[bucket.number]:
                    break
                self._set_off(bucket)

    # how ----------------------------------------------------------------------------------------

    def _begin_iteration(self) -> None:
        count = len(self.parameters)
        self._used = [False] * count
        self._seen = [False] * count
        self._repeats = [False] * count
        self._missing = [len(bucket.indices) for bucket in self._buckets]
        self._flights: List[Flight] = []
        self._queued = False
        self._before = self.reduction.sent, self.reduction.shared
        self._started = self._ended = self._busy = 0.0

    def _set_off(self, bucket: Bucket) -> None:
        """Fetch a bucket and begin to average it, and take the others one step further."""
        if not self._flights:
            self.reduction.begin()
            self._started = time.perf_counter()
        here = [place for place, index in enumerate(bucket.indices) if self._used[index]]
        gradients = [self._dense_gradient(bucket.indices[place]) for place in here]
        if len(here) < len(bucket.indices):
            bucket.flat.zero_()
        copied = self._fetch(gradients, [bucket.views[place] for place in here])
        begin = time.perf_counter()
        self._flights.append(Flight(bucket, self._average(bucket, copied)))
        for flight in self._flights:
            if not flight.landed:
                flight.advance()
        self._busy += time.perf_counter() - begin

    def _fetch(
        self, gradients: Sequence[Tensor], views: Sequence[Tensor]
    ) -> Optional[Callable[[], None]]:
        if not self.accelerator.lazy:
            return self.accelerator.start_copy_to_host(gradients, views)
        most, first, size = self._bytes // FETCHED_PARTS, 0, 0
        for end, view in enumerate(views):
            bytes_ = view.numel() * view.element_size()
            if size + bytes_ > most and end > first:
                self.accelerator.copy_to_host(gradients[first:end], views[first:end])
                first, size = end, 0
            size += bytes_
        self.accelerator.copy_to_host(gradients[first:], views[first:])
        return None

    def _average(self, bucket: Bucket, copied: Optional[Callable[[], None]]) -> Steps:
        if copied is not None:
            yield
            copied()
        check = self.policy.active or self.policy.suspended
        return (yield from self.reduction.average(bucket, check))

    def _dense_gradient(self, index: int) -> Tensor:
        gradient = self.parameters[index].grad
        if gradient.is_sparse:
            raise ModelError(
                f'parameter {self.names[index]!r} has a sparse gradient, which cannot be '
                f'averaged through the host; build its module with sparse=False.'
            )
        return gradient

    def _finish(self) -> None:
        """Average what is left, when backward has ended, and send the averages to the device."""
        with torch.no_grad():
            for bucket in self._buckets[len(self._flights) :]:
                self._set_off(bucket)
            used, repeats = self._agree_on_use()
            planned = set(self._plan)
            late = tuple(i for i in range(len(used)) if used[i] and i not in planned)
            again = {i for i in planned if repeats[i]}
            for bucket in self._late_buckets(late):
                self._set_off(bucket)
            if again:
                self._repeat(again)
            bad = self._land(used)
            self.finite = all(flight.finite for flight in self._flights)
            self.reduction.end()
            found = names_of_nonfinite(self._gradients_here(bad))
            self._record()
            self._replan(used, repeats)
            self._begin_iteration()
            if bad:
                self.policy.settle(found)
                self._skip()

    def _agree_on_use(self) -> Tuple[List[bool], List[bool]]:
        """Learn which parameters any rank used, and for which any rank was too early."""
        flags = torch.tensor([self._used, self._repeats], dtype=torch.int32)
        agreed = torch_dist.all_reduce(flags, group=self.group, async_op=True)
        gradients = [p.grad for p, here in zip(self.parameters, self._used) if here]
        # While a lazy device works, the message travels.
        self.accelerator.materialize_all(self.devices, gradients)
        agreed.wait()
        used, repeats = (flags > 0).tolist()
        return used, repeats

    def _repeat(self, again: Set[int]) -> None:
        """Average buckets a second time, because some of their gradients were not complete."""
        for flight in self._flights:
            self._complete(flight)
        self.reduction.end()
        self.reduction.begin()
        flights = [f for f in self._flights if not again.intersection(f.bucket.indices)]
        repeated = [f.bucket for f in self._flights if again.intersection(f.bucket.indices)]
        self._flights = flights
        for bucket in repeated:
            self._set_off(bucket)

    def _land(self, used: Sequence[bool]) -> List[Bucket]:
        """Wait for the averages and send them to the device.

        Returns:
            List[Bucket]: Those that are not finite. They are not sent, so the device still has
            this rank's own gradients.
        """
        bad = []
        for flight in self._flights:
            self._complete(flight)
            # A gradient scaler looks for itself.
            if flight.finite or self.policy.suspended:
                self._send(flight.bucket, used)
            else:
                bad.append(flight.bucket)
        return bad

    def _complete(self, flight: Flight) -> None:
        begin = time.perf_counter()
        flight.land()
        self._ended = time.perf_counter()
        self._busy += self._ended - begin

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

    def _gradients_here(self, buckets: Sequence[Bucket]) -> List[Tuple[str, Tensor]]:
        """The names and this rank's own gradients of buckets that were not sent."""
        indices = [i for bucket in buckets for i in bucket.indices if self._used[i]]
        fetched = self.accelerator.to_host([self.parameters[i].grad for i in indices])
        return [(self.names[i], gradient) for i, gradient in zip(indices, fetched)]

    def _skip(self) -> None:
        # An optimizer passes over parameters without a gradient, momentum and decay included.
        for parameter in self.parameters:
            parameter.grad = None
        if self.reduction.compression is not None:
            self.reduction.compression.reset()

    def _record(self) -> None:
        if self._flights:
            TRAFFIC.record(
                'gradients',
                sent=self.reduction.sent - self._before[0],
                shared=self.reduction.shared - self._before[1],
                seconds=self._ended - self._started,
                waited=self._busy,
                messages=len(self._flights),
            )

    # which gradients travel together ------------------------------------------------------------

    def _set_buckets(self) -> None:
        self._buckets = self._pack(self._plan)
        self._bucket_of = {i: b.number for b in self._buckets for i in b.indices}

    def _replan(self, used: Sequence[bool], repeats: Sequence[bool]) -> None:
        """Let those gradients set off early that were used this time and came in one piece."""
        if not self.overlap:
            return
        self._repeating = [was or is_ for was, is_ in zip(self._repeating, repeats)]
        plan = [i for i in reversed(range(len(used))) if used[i] and not self._repeating[i]]
        if plan != self._plan:
            self._plan = plan
            self._set_buckets()
            self._late = {}
            self._forget_compression()

    def _late_buckets(self, indices: Tuple[int, ...]) -> List[Bucket]:
        """Buckets behind those of the plan; the last are kept, since they rarely change."""
        if indices not in self._late:
            if self._late:
                self._forget_compression()
            self._late = {indices: self._pack(indices, behind=self._plan)}
        return self._late[indices]

    def _forget_compression(self) -> None:
        if self.reduction.compression is not None:
            self.reduction.compression.reset()

    def _pack(self, indices: Sequence[int], behind: Sequence[int] = ()) -> List[Bucket]:
        """Divide gradients into buckets.

        Args:
            indices (Sequence[int]): Which, in the order in which they travel.
            behind (Sequence[int]): Those that have the first part of the memory.
        """
        buckets: List[Bucket] = []
        # float32 first: PowerSGD counts iterations by the bucket with number 0.
        for dtype in sorted(self._memory, key=lambda dtype: dtype != torch.float32):
            memory = self._memory[dtype]
            start = end = sum(self._numel(i) for i in self._with_dtype(behind, dtype))
            group: List[int] = []
            chosen = self._with_dtype(indices, dtype)
            for index in chosen:
                group.append(index)
                end += self._numel(index)
                full = (end - start) * memory.element_size() >= self.bucket_bytes
                if full or index == chosen[-1]:
                    number = len(self._buckets if behind else []) + len(buckets)
                    buckets.append(self._bucket(group, memory[start:end], number))
                    group, start = [], end
        return buckets

    def _with_dtype(self, indices: Sequence[int], dtype: torch.dtype) -> List[int]:
        return [i for i in indices if _dtype_on_the_wire(self.parameters[i]) == dtype]

    def _numel(self, index: int) -> int:
        return _numel_on_the_wire(self.parameters[index])

    def _bucket(self, indices: List[int], flat: Tensor, number: int) -> Bucket:
        parameters = [self.parameters[i] for i in indices]
        pieces = flat.split([_numel_on_the_wire(parameter) for parameter in parameters])
        views = [_shaped_like(piece, parameter) for piece, parameter in zip(pieces, parameters)]
        return Bucket(flat, views, number, indices)


def _dtype_on_the_wire(parameter: Tensor) -> torch.dtype:
    if parameter.is_complex():
        return torch.float64 if parameter.dtype == torch.complex128 else torch.float32
    return _SUMMED_IN.get(parameter.dtype, parameter.dtype)


def _numel_on_the_wire(parameter: Tensor) -> int:
    return parameter.numel() * (2 if parameter.is_complex() else 1)


def _shaped_like(piece: Tensor, parameter: Tensor) -> Tensor:
    if parameter.is_complex():
        return torch.view_as_complex(piece.view(*parameter.shape, 2))
    return piece.view(parameter.shape)
