"""Averaging gradients through the host, for devices whose tensors the backend refuses.

The figures that shaped this: on a lazy device every copy made during backward costs a graph
execution, so nothing is touched until backward has ended. Then there is one materialization, and
for each bucket one batched fetch, one all-reduce on the host and one batched send, where the
all-reduce of a bucket overlaps with the fetch of the next and the send of the one before.
"""

from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor, distributed as torch_dist, nn

from mmdevplug.device import Accelerator
from mmdevplug.errors import ModelError

BUCKET_BYTES = 8 << 20

#: Half precision is summed in float32: gloo of older releases lacks it, and it loses bits.
_SUMMED_IN = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


class Bucket(NamedTuple):
    """Gradients that travel in one message.

    Attributes:
        indices (List[int]): Which parameters, as indices into the list of all of them.
        views (List[Tensor]): For each, a piece of ``flat`` in the shape of the gradient.
        flat (Tensor): One-dimensional host memory.
    """

    indices: List[int]
    views: List[Tensor]
    flat: Tensor


class GradientStaging:
    """Averages gradients over ranks at the end of backward.

    Which parameters were used travels first, while the device still computes; a parameter that
    no rank used costs nothing more, and one that some ranks used counts as zero on the others,
    as under DDP with ``find_unused_parameters=True``.

    Args:
        named_parameters (Sequence[Tuple[str, nn.Parameter]]): Those that require gradients, each
            once, in the same order on every rank.
        accelerator (Accelerator): Copies between device and host.
        device (torch.device): The device of the parameters.
        group (ProcessGroup, optional): Defaults to None: all ranks.
        bucket_bytes (int): Size of a message. Defaults to 8 MB.
    """

    def __init__(
        self,
        named_parameters: Sequence[Tuple[str, nn.Parameter]],
        accelerator: Accelerator,
        device: torch.device,
        group: Any = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.names = [name for name, _ in named_parameters]
        self.parameters = [parameter for _, parameter in named_parameters]
        self.accelerator = accelerator
        self.device = device
        self.group = group
        self.world_size = torch_dist.get_world_size(group)
        self.bucket_bytes = bucket_bytes
        self._memory = self._allocate()
        self._plans: Dict[Tuple[bool, ...], List[Bucket]] = {}
        self._used = [False] * len(self.parameters)
        self._armed = False
        self._queued = False
        for index, parameter in enumerate(self.parameters):
            parameter.register_hook(self._make_hook(index))

    def _allocate(self) -> Dict[torch.dtype, Tensor]:
        """Host memory for all gradients, allocated once; one piece for each dtype."""
        sizes: Dict[torch.dtype, int] = {}
        for parameter in self.parameters:
            dtype = _dtype_on_the_wire(parameter)
            sizes[dtype] = sizes.get(dtype, 0) + _numel_on_the_wire(parameter)
        return {dtype: torch.empty(size, dtype=dtype) for dtype, size in sizes.items()}

    # when ---------------------------------------------------------------------------------------

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
            for tensor in _tensors_in(outputs):
                if tensor.requires_grad:
                    tensor.register_hook(self._queue)

    def _make_hook(self, index: int) -> Any:
        def mark_used(_: Tensor) -> None:
            self._used[index] = True
            self._queue()

        return mark_used

    def _queue(self, _: Any = None) -> None:
        if self._armed and not self._queued:
            self._queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._average)

    # how ----------------------------------------------------------------------------------------

    def _average(self) -> None:
        self._queued = False
        with torch.no_grad():
            used = torch.tensor(self._used, dtype=torch.int32)
            agreed = torch_dist.all_reduce(used, group=self.group, async_op=True)
            self._refuse_sparse()
            gradients = [
                parameter.grad if used else None
                for parameter, used in zip(self.parameters, self._used)
            ]
            wanted = [gradient for gradient in gradients if gradient is not None]
            self.accelerator.materialize(self.device, wanted)
            agreed.wait()
            buckets = self._plan(tuple(bool(count) for count in used.tolist()))
            works = [self._reduce(bucket, gradients) for bucket in buckets]
            for bucket, work in zip(buckets, works):
                work.wait()
                self._send(bucket)
        self._used = [False] * len(self.parameters)

    def _refuse_sparse(self) -> None:
        for name, parameter, used in zip(self.names, self.parameters, self._used):
            if used and parameter.grad.is_sparse:
                raise ModelError(
                    f'parameter {name!r} has a sparse gradient, which cannot be '
                    f'averaged through the host; build its module with sparse=False.'
                )

    def _reduce(self, bucket: Bucket, gradients: Sequence[Optional[Tensor]]) -> Any:
        """Fetch a bucket and begin to add it up; the next is fetched meanwhile."""
        here = [place for place, index in enumerate(bucket.indices) if self._used[index]]
        if len(here) < len(bucket.indices):
            bucket.flat.zero_()
        self.accelerator.copy_to_host(
            [gradients[bucket.indices[place]] for place in here],
            [bucket.views[place] for place in here],
        )
        bucket.flat.div_(self.world_size)
        return torch_dist.all_reduce(bucket.flat, group=self.group, async_op=True)

    def _send(self, bucket: Bucket) -> None:
        gradients = []
        for index in bucket.indices:
            parameter = self.parameters[index]
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            gradients.append(parameter.grad)
        self.accelerator.copy_to_device(bucket.views, gradients)

    def _plan(self, used: Tuple[bool, ...]) -> List[Bucket]:
        """Pack the used parameters into buckets; the last plan is kept, since they rarely change.

        Args:
            used (Tuple[bool, ...]): For each parameter whether any rank used it.
        """
        if used not in self._plans:
            self._plans = {used: self._pack([i for i, is_used in enumerate(used) if is_used])}
        return self._plans[used]

    def _pack(self, indices: Sequence[int]) -> List[Bucket]:
        buckets = []
        for dtype, memory in self._memory.items():
            chosen = [i for i in indices if _dtype_on_the_wire(self.parameters[i]) == dtype]
            start = end = 0
            group: List[int] = []
            for index in chosen:
                group.append(index)
                end += _numel_on_the_wire(self.parameters[index])
                if (end - start) * memory.element_size() >= self.bucket_bytes:
                    buckets.append(self._bucket(group, memory[start:end]))
                    group, start = [], end
            if group:
                buckets.append(self._bucket(group, memory[start:end]))
        return buckets

    def _bucket(self, indices: List[int], flat: Tensor) -> Bucket:
        parameters = [self.parameters[i] for i in indices]
        pieces = flat.split([_numel_on_the_wire(parameter) for parameter in parameters])
        views = [_shaped_like(piece, parameter) for piece, parameter in zip(pieces, parameters)]
        return Bucket(indices, views, flat)


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


def _tensors_in(nested: Any) -> List[Tensor]:
    """The tensors in nested dicts, lists and tuples."""
    if isinstance(nested, Tensor):
        return [nested]
    if isinstance(nested, dict):
        nested = list(nested.values())
    if isinstance(nested, (list, tuple)):
        return [tensor for item in nested for tensor in _tensors_in(item)]
    return []
