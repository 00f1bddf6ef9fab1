"""Compress gradients to half precision, or to products of thin matrices."""

from typing import Any, Generator, List, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor, distributed as torch_dist, nn

from mmdevplug.config.model_wrapper import GradCompression
from mmdevplug.distributed.traffic import all_reduce_bytes
from mmdevplug.errors import ModelError
from mmdevplug.utils.torch_compat import gathers_into_tensor, view_as_dtype

from .buckets import Bucket
from .nonfinite import mark_nonfinite, scale_and_check

#: Yields nothing; returns the bytes that this rank sent.
Sending = Generator[None, None, float]


class HalfCompression:
    """Send two bytes for each value, float16 or bfloat16, and add up in float32.

    gloo adds up in the dtype that it sends. Here each rank receives its share of the bucket from
    all others, adds up in float32, rounds once, and sends the result to all. This takes the same
    number of bytes as a ring.
    """

    #: Whether parts of a bucket may be compressed separately.
    works_on_parts = True

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._free: List[Tensor] = []

    def all_reduce(self, bucket: Bucket, group: Any = None) -> Sending:
        """Add up a bucket of float32 over all ranks of a group, in place."""
        flat = bucket.flat
        world_size, rank = torch_dist.get_world_size(group), torch_dist.get_rank(group)
        # An even number of halves, because they are sent as int32.
        share = -(-flat.numel() // (2 * world_size)) * 2
        sent, received = self._take(share * world_size), self._take(share * world_size)
        sent[: flat.numel()].copy_(flat)
        sent[flat.numel() :].zero_()
        if self.dtype == torch.float16 and scale_and_check(sent, 1.0):
            mark_nonfinite(sent)
        # As integers, which gloo of any release can send.
        sent_integers = view_as_dtype(sent, torch.int32)
        received_integers = view_as_dtype(received, torch.int32)
        work = torch_dist.all_to_all_single(
            received_integers, sent_integers, group=group, async_op=True
        )
        yield
        work.wait()
        mine = sent[rank * share : (rank + 1) * share]
        mine.copy_(torch.sum(received.view(world_size, share), 0, dtype=torch.float32))
        work = _all_gather(received_integers, view_as_dtype(mine, torch.int32), group)
        yield
        work.wait()
        flat.copy_(received[: flat.numel()])
        self._free += [sent, received]
        return all_reduce_bytes(received.numel() * received.element_size(), world_size)

    def reset(self) -> None:
        """Release the buffers: the sizes of buckets have changed."""
        self._free = []

    def _take(self, size: int) -> Tensor:
        """Return a free buffer, or a new one."""
        for place, buffer in enumerate(self._free):
            if buffer.numel() == size:
                return self._free.pop(place)
        return torch.empty(size, dtype=self.dtype)


class PowerSGDCompression:
    """Send matrices as products of thin ones, with error feedback: PyTorch's PowerSGD.

    T. Vogels, S. P. Karimireddy, M. Jaggi: PowerSGD: Practical Low-Rank Gradient Compression for
    Distributed Optimization, NeurIPS 2019. The options are those of ``PowerSGDState``.
    """

    works_on_parts = False

    def __init__(self, **options: Any) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd

        self._hook = powersgd.powerSGD_hook
        self._state = powersgd.PowerSGDState(process_group=None, **options)

    def all_reduce(self, bucket: Bucket, group: Any = None) -> Sending:
        """Add up a bucket over all ranks of a group, in place; see :class:`HalfCompression`."""
        self._state.process_group = group
        compressing = self._state.iter >= self._state.start_powerSGD_iter
        before = self._state.total_numel_after_compression
        world_size = torch_dist.get_world_size(group)
        # Wait at once: the hook starts collectives when others end, so with several buckets in
        # progress their order would differ between ranks.
        average = self._hook(self._state, bucket).wait()
        bucket.flat.copy_(average).mul_(world_size)
        yield
        numel = self._state.total_numel_after_compression - before
        return all_reduce_bytes(
            (numel if compressing else bucket.flat.numel()) * bucket.flat.element_size(),
            world_size,
        )

    def reset(self) -> None:
        """Drop errors and factors, for other buckets, or after values that are not finite."""
        for memory in ('error_dict', 'p_memory_dict', 'q_memory_dict'):
            getattr(self._state, memory).clear()


Compression = Union[HalfCompression, PowerSGDCompression]


def make_compression(
    option: GradCompression, named_parameters: Sequence[Tuple[str, nn.Parameter]]
) -> Optional[Compression]:
    """Make what ``grad_compression`` asks for, None for ``'none'``.

    Raises:
        ModelError: If a parameter's dtype cannot be compressed.
    """
    kind = option.kind
    if kind == 'none':
        return None
    for name, parameter in named_parameters:
        if not parameter.dtype.is_floating_point:
            raise ModelError(
                f'model_wrapper_cfg.grad_compression={kind!r} compresses real floating-point '
                f'gradients, but that of {name} is {parameter.dtype}. Train that parameter in '
                f"a floating-point dtype, or set grad_compression='none'."
            )
    if kind == 'powersgd':
        return PowerSGDCompression(**option.powersgd_options)
    return HalfCompression({'bf16': torch.bfloat16, 'fp16': torch.float16}[kind])


def _all_gather(target: Tensor, source: Tensor, group: Any) -> Any:
    """Gather into one tensor; gloo before 2.4 takes only lists, which costs another copy."""
    if gathers_into_tensor():
        return torch_dist.all_gather_into_tensor(target, source, group=group, async_op=True)
    parts = list(target.chunk(torch_dist.get_world_size(group)))
    return torch_dist.all_gather(parts, source, group=group, async_op=True)
