"""Compress gradients with PyTorch's hooks: to half precision, or to products of thin matrices."""

from typing import Any, Callable, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor, distributed as torch_dist, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from mmdevplug.config.model_wrapper import GradCompression
from mmdevplug.distributed.traffic import all_reduce_bytes
from mmdevplug.errors import ModelError

from .buckets import HostBucket

#: The types of ``grad_compression``.
HALVES = dict(bf16=torch.bfloat16, fp16=torch.float16)


class PowerSGD:
    """Send matrices as products of thin ones, with error feedback: PyTorch's PowerSGD.

    T. Vogels, S. P. Karimireddy, M. Jaggi: PowerSGD: Practical Low-Rank Gradient Compression for
    Distributed Optimization, NeurIPS 2019. The options are those of ``PowerSGDState``.
    """

    def __init__(self, **options: object) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd

        self._hook = powersgd.powerSGD_hook
        self.state = powersgd.PowerSGDState(process_group=None, **options)

    def average(self, group: 'torch_dist.ProcessGroup', bucket: Any) -> Any:
        """Average a bucket of DDP or a :class:`HostBucket`; returns a future."""
        self.state.process_group = group
        return self._hook(self.state, bucket)

    def open(self, room: Tensor, group: 'torch_dist.ProcessGroup') -> 'PowerSGDAverage':
        """An average in host memory, as of a :class:`mmdevplug.staged.reductions.HostSum`."""
        return PowerSGDAverage(self, room, group)

    def bytes_of(
        self, numel: int, world_size: int, average: Callable[[], Any]
    ) -> Tuple[Any, float]:
        """Run an average of ``numel`` elements of float32; returns it and the bytes sent."""
        compressing = self.state.iter >= self.state.start_powerSGD_iter
        before = self.state.total_numel_after_compression
        result = average()
        if compressing:
            numel = self.state.total_numel_after_compression - before
        return result, all_reduce_bytes(numel * 4, world_size)

    def reset(self) -> None:
        """Drop errors and factors, for other buckets, or after values that are not finite."""
        for memory in ('error_dict', 'p_memory_dict', 'q_memory_dict'):
            getattr(self.state, memory).clear()


class PowerSGDAverage:
    """An average of a bucket in host memory, see :class:`mmdevplug.staged.reductions.HostSum`."""

    def __init__(self, powersgd: PowerSGD, own: Tensor, group: 'torch_dist.ProcessGroup') -> None:
        self.own, self.finite, self.sent = own, True, 0.0
        self.bucket: Optional[HostBucket] = None
        self._powersgd, self._group = powersgd, group

    def start(self, average: bool) -> None:
        # Waits at once: the hook starts collectives when others end, so with several buckets in
        # progress their order would differ between ranks.
        def run() -> Tensor:
            return self._powersgd.average(self._group, self.bucket).wait()

        size = self._group.size()
        result, self.sent = self._powersgd.bytes_of(self.own.numel(), size, run)
        self.own.copy_(result)
        self.finite = bool(torch.isfinite(self.own).all())

    def wait(self) -> bool:
        return True

    def read(self, start: int, stop: int) -> Tensor:
        return self.own[start:stop]

    def close(self) -> None:
        """The memory is the caller's."""


#: ``'bf16'`` or ``'fp16'``, or what has a state.
Compression = Union[str, PowerSGD]


def half_hook(kind: str) -> Any:
    """PyTorch's hook for ``'bf16'`` or ``'fp16'``."""
    return getattr(default_hooks, f'{kind}_compress_hook')


def make_compression(
    option: GradCompression, named_parameters: Sequence[Tuple[str, nn.Parameter]]
) -> Optional[Compression]:
    """Make what ``grad_compression`` asks for, None for ``'none'``.

    Raises:
        ModelError: If a parameter's dtype cannot be compressed, or PyTorch has no such hook.
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
    return PowerSGD(**option.powersgd_options) if kind == 'powersgd' else kind
