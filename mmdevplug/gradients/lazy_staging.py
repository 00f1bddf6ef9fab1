"""Average gradients through host memory at the end of backward.

On a lazy device every copy during backward costs an execution of the graph. So backward only
records which parameters it used. At its end the device is materialized once, and each bucket costs
batched fetches of at most ``FETCH_BYTES`` and one batched send.
"""

import threading
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from mmdevplug.accelerators import Accelerator, devices_of
from mmdevplug.distributed.byte_exchange import group_by_bytes
from mmdevplug.distributed.nonfinite import FinitePolicy, names_of_nonfinite
from mmdevplug.errors import ModelError
from mmdevplug.staged.staged_group import StagedProcessGroup
from mmdevplug.staged.work import StagedWork
from mmdevplug.utils.pytree import tensors_in

#: Size of a message.
BUCKET_BYTES = 8 << 20
#: A batched fetch allocates host memory: at most this, or one gradient, so that it is still in the
#: processor's cache when it is copied on.
FETCH_BYTES = 2 << 20

#: Half precision is summed in float32: gloo of older releases lacks it, and it loses bits.
SUMMED_IN = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


class Bucket(NamedTuple):
    """Gradients of one dtype that are averaged together, in memory of the host."""

    indices: List[int]  # of the parameters
    memory: Tensor  # flat, of the dtype on the wire
    views: List[Tensor]  # for each gradient its piece of the memory, in its shape


class LazyStaging:
    """Average gradients over ranks through host memory, when backward has ended.

    All ranks agree on the parameters that were used. A parameter that no rank used keeps ``.grad``
    as it is. One that some ranks used counts as zero on the others, as under DDP with
    ``find_unused_parameters=True``.

    Args:
        named_parameters (Sequence[Tuple[str, nn.Parameter]]): What is trained.
        accelerator (Accelerator): That of the parameters.
        group (StagedProcessGroup): Averages in host memory.
        bucket_bytes (int, optional): Size of a message. Defaults to None: 8 MB or less.
        compress (bool): Whether gradients of float32 travel as bfloat16. Defaults to False.
        policy (FinitePolicy, optional): For NaN. Defaults to None: it stops the training.
        before (LazyStaging, optional): What it stands in for.

    Attributes:
        finite (bool): Whether the last averages were finite, the same on all ranks.
    """

    def __init__(
        self,
        named_parameters: Sequence[Tuple[str, nn.Parameter]],
        accelerator: Accelerator,
        group: StagedProcessGroup,
        bucket_bytes: Optional[int] = None,
        compress: bool = False,
        policy: Optional[FinitePolicy] = None,
        before: Optional['LazyStaging'] = None,
    ) -> None:
        self.names = [name for name, _ in named_parameters]
        self.parameters = [parameter for _, parameter in named_parameters]
        self._ids = {id(parameter) for parameter in self.parameters}
        self.accelerator = accelerator
        # A model that is spread over several devices has parameters on all of them.
        self.devices = devices_of(self.parameters)
        self.group = group
        self.policy = FinitePolicy(True) if policy is None else policy
        self.finite = True
        self.compress = compress
        self._lock = threading.Lock()
        self._synchronize = False
        size = sum(p.numel() * p.element_size() for p in self.parameters)
        # Sending begins after backward, for all buckets: a small last one would not overlap with
        # it, but cost a message more. So all have about the same size.
        even = -(-size // max(1, round(size / BUCKET_BYTES)))
        self._bucket_bytes = bucket_bytes or even
        self._divided: Optional[Tuple[List[int], List[Bucket]]] = None
        self._hooks: List[RemovableHandle] = []
        self._used: List[bool] = []
        self._begin_iteration()
        if before is not None:
            for hook in before._hooks:
                hook.remove()
            # It may have seen gradients to be accumulated.
            used = {id(p) for p, is_used in zip(before.parameters, before._used) if is_used}
            self._used = [id(parameter) in used for parameter in self.parameters]
        self._hooks = [
            parameter.register_hook(lambda _, index=index: self._mark_used(index))
            for index, parameter in enumerate(self.parameters)
        ]

    def covers(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Return whether the gradients of all these parameters are averaged here."""
        return self._ids.issuperset(map(id, parameters))

    def prepare(self, outputs: object, synchronize: bool) -> None:
        """Prepare for the backward pass that follows; it averages unless under ``no_sync``."""
        self._synchronize = synchronize
        self._queued = False
        if synchronize:
            # Not only hooks of parameters: these may run inside the inner backward of a
            # checkpointed segment, whose end is not the end of backward.
            for tensor in tensors_in(outputs):
                if tensor.requires_grad:
                    tensor.register_hook(self._queue_finish)

    def average(self) -> None:
        """Average now what backward passes have added since the last average; no rank may skip it.

        For a model that decides by itself when gradients are complete; :meth:`prepare` is not
        called for it.
        """
        self._finish()

    def _queue_finish(self, _: object = None) -> None:
        with self._lock:
            is_due = self._synchronize and not self._queued
            self._queued = self._queued or is_due
        if is_due:
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _begin_iteration(self) -> None:
        self._used = [False] * len(self.parameters)
        self._queued = False

    def _mark_used(self, index: int) -> None:
        self._used[index] = True
        self._queue_finish()

    def _finish(self) -> None:
        with torch.no_grad():
            used = self._materialize_and_agree()
            started = [(bucket, self._start(bucket)) for bucket in self._divide(used)]
            nonfinite = self._send_averages(started, used)
            self._begin_iteration()
            self.finite = not nonfinite
            if nonfinite and not self.policy.suspended:
                self._refuse(nonfinite)

    def _materialize_and_agree(self) -> List[bool]:
        """Compute the gradients, and return which parameters any rank used."""
        flags = torch.tensor(self._used, dtype=torch.int32, device='cpu')
        agreed = self.group.allreduce([flags])
        gradients: Any = [p.grad for p, here in zip(self.parameters, self._used) if here]
        # The all-reduce runs while a lazy device computes.
        self.accelerator.compilation.materialize_all(self.devices, gradients)
        agreed.wait()
        return (flags > 0).tolist()

    def _divide(self, used: Sequence[bool]) -> List[Bucket]:
        """Divide the gradients into buckets, which rarely change between iterations."""
        indices = [index for index, is_used in enumerate(used) if is_used]
        if self._divided is None or self._divided[0] != indices:
            half = torch.bfloat16 if self.compress else None
            buckets = divide(self.parameters, indices, self._bucket_bytes, half)
            self._divided = indices, buckets
        return self._divided[1]

    def _start(self, bucket: Bucket) -> StagedWork:
        """Fetch a bucket and start to average it."""
        here = [place for place, index in enumerate(bucket.indices) if self._used[index]]
        if len(here) < len(bucket.indices):
            bucket.memory.zero_()
        gradients = [self._dense_gradient(bucket.indices[place]) for place in here]
        first = 0
        for part in group_by_bytes([bucket.views[place] for place in here], FETCH_BYTES):
            self.accelerator.copies.into_host(gradients[first : first + len(part)], part)
            first += len(part)
        return self.group.average(bucket.memory)

    def _dense_gradient(self, index: int) -> Tensor:
        gradient: Any = self.parameters[index].grad
        if gradient.is_sparse:
            raise ModelError(
                f'parameter {self.names[index]!r} has a sparse gradient, which cannot be '
                f'averaged through the host; build its module with sparse=False.'
            )
        return gradient

    def _send_averages(
        self, started: Sequence[Tuple[Bucket, StagedWork]], used: Sequence[bool]
    ) -> List[Bucket]:
        """Send the averages to the device, and return the buckets that are not finite.

        Those are not sent, so the device still has this rank's own gradients.
        """
        nonfinite = []
        for bucket, average in started:
            average.wait()
            ignored = not self.policy.active and not self.policy.suspended
            if not average.finite and not ignored:
                nonfinite.append(bucket)
            # A gradient scaler checks the averages on the device.
            if average.finite or ignored or self.policy.suspended:
                self._send(bucket, used)
        return nonfinite

    def _send(self, bucket: Bucket, used: Sequence[bool]) -> None:
        sources, targets = [], []
        for index, view in zip(bucket.indices, bucket.views):
            if not used[index]:
                continue
            parameter = self.parameters[index]
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            sources.append(view if view.dtype == parameter.dtype else view.to(parameter.dtype))
            targets.append(parameter.grad)
        self.accelerator.copies.into_device(sources, targets)

    def _refuse(self, nonfinite: Sequence[Bucket]) -> None:
        """Name the gradients of averages that are not finite, and stop."""
        indices = [
            index
            for bucket in nonfinite
            for index in bucket.indices
            if self.parameters[index].grad is not None
        ]
        gradients: Any = [self.parameters[i].grad for i in indices]
        fetched = self.accelerator.copies.to_host(gradients)
        self.policy.stop(
            names_of_nonfinite([(self.names[i], own) for i, own in zip(indices, fetched)])
        )


def divide(
    parameters: Sequence[Tensor],
    indices: Sequence[int],
    bucket_bytes: int,
    compressed_to: Optional[torch.dtype] = None,
) -> List[Bucket]:
    """Divide the gradients with these indices, in this order, into buckets.

    A bucket is full when it has at least ``bucket_bytes``. Gradients of float32 travel as
    ``compressed_to``, if given.
    """
    by_dtype: Dict[torch.dtype, List[int]] = {}
    for index in indices:
        by_dtype.setdefault(_wire_dtype(parameters[index]), []).append(index)
    buckets: List[Bucket] = []
    for dtype in by_dtype:
        wire = compressed_to if compressed_to is not None and dtype == torch.float32 else dtype
        element_size = torch.empty(0, dtype=dtype).element_size()
        group: List[int] = []
        sizes: List[int] = []
        for index in by_dtype[dtype]:
            group.append(index)
            sizes.append(parameters[index].numel() * (2 if parameters[index].is_complex() else 1))
            if sum(sizes) * element_size >= bucket_bytes or index == by_dtype[dtype][-1]:
                memory, views = torch.empty(sum(sizes), dtype=wire, device='cpu'), []
                for each, piece in zip(group, memory.split(sizes)):
                    if parameters[each].is_complex():
                        piece = torch.view_as_complex(piece.view(-1, 2))
                    views.append(piece.view(parameters[each].shape))
                buckets.append(Bucket(group, memory, views))
                group, sizes = [], []
    return buckets


def _wire_dtype(parameter: Tensor) -> torch.dtype:
    if parameter.is_complex():
        return torch.float64 if parameter.dtype == torch.complex128 else torch.float32
    return SUMMED_IN.get(parameter.dtype, parameter.dtype)
