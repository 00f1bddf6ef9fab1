"""Explain an out-of-memory error: what holds memory, and which batch size to try."""

import gc
import re
from collections import Counter
from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, Mapping, Optional, Tuple

import psutil
import torch
from mmengine.optim import OptimWrapper
from torch import Tensor

from mmdevplug.distributed.process_group import rank_device
from mmdevplug.errors import DeviceOutOfMemoryError, DevPlugError
from mmdevplug.utils.byte_sizes import format_bytes
from mmdevplug.utils.memory_growth import describe_tensor, tensor_bytes
from mmdevplug.utils.model import list_optim_wrappers, unwrap_model

#: What the libraries say of the host's memory, and of a device's.
_HOST = re.compile(
    r"DefaultCPUAllocator|bad_alloc|cannot allocate memory|can't allocate memory", re.IGNORECASE
)
_DEVICE = re.compile(r'out of memory|RESOURCE_EXHAUSTED', re.IGNORECASE)
MOST_NAMED = 5
#: Above this part, what no batch size changes is what fills the memory.
MOSTLY_FIXED = 0.75


@contextmanager
def explain_out_of_memory(runner: Any, stage: str) -> Iterator[None]:
    """Turn errors of full memory into one that says what fills it and what to try.

    Args:
        runner (Runner): The runner.
        stage (str): ``'train'``, ``'val'`` or ``'test'``: whose batch size is meant.

    Raises:
        DeviceOutOfMemoryError: In place of the error of PyTorch, XLA or a vendor's library.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        place = out_of_memory_at(error)
        if place is None:
            raise
        raise DeviceOutOfMemoryError(_message(runner, stage, place, error)) from error


def out_of_memory_at(error: BaseException) -> Optional[str]:
    """Say whose memory an error is about.

    Args:
        error (BaseException): Of any library.

    Returns:
        str or None: ``'host'``, ``'device'``, or None for other errors.
    """
    if isinstance(error, DevPlugError):
        return None
    text = str(error)
    if isinstance(error, MemoryError) or _HOST.search(text):
        return 'host'
    kind = getattr(torch.cuda, 'OutOfMemoryError', None)  # from torch 1.13 on
    known = kind is not None and isinstance(error, kind)
    return 'device' if known or _DEVICE.search(text) else None


def _message(runner: Any, stage: str, place: str, error: BaseException) -> str:
    accelerator, device = rank_device()
    if place == 'host':
        device = torch.device('cpu')
        in_use: Optional[int] = psutil.Process().memory_info().rss
        total: Optional[int] = psutil.virtual_memory().total
    else:
        in_use = accelerator.memory_allocated(device)
        total = accelerator.memory_total(device)
    where = f'rank {runner.rank}: {device} has no memory left in {stage}'
    used = '' if in_use is None else f' with {format_bytes(in_use)} in use'
    of = '' if total is None else f' of {format_bytes(total)}'
    first_line = (str(error) or type(error).__name__).splitlines()[0]
    parts = [f'{where}{used}{of}: {first_line}']
    fixed = None
    try:
        live = LiveTensors(runner, device.type)
        fixed = live.fixed
        parts.append(live.describe())
    except MemoryError:
        parts.append('There is no memory left to find out what holds it either.')
    parts.append(_advice(runner, stage, in_use, fixed))
    return '\n'.join(parts)


class LiveTensors:
    """The tensors that Python knows on devices of one type; nothing is run for it.

    What autograd alone keeps for backward is not among them.

    Args:
        runner (Runner): Its model and optimizers have names for tensors.
        device_type (str): As of ``torch.device``.

    Attributes:
        fixed (int): Bytes of parameters, buffers, gradients and optimizer state, which do not
            depend on the batch.
        others (int): Bytes of all other tensors.
    """

    def __init__(self, runner: Any, device_type: str) -> None:
        named = _named_tensors(runner)
        self._sizes: Dict[str, int] = Counter()
        self._parts: Dict[str, List[str]] = {}
        self.fixed = self.others = 0
        # One object for each of them, because reading `grad` may make a new one.
        for owner, part, tensor in named.values():
            if tensor.device.type == device_type:
                self._sizes[owner] += tensor_bytes(tensor)
                self._parts.setdefault(owner, []).append(part)
                self.fixed += tensor_bytes(tensor)
        counts: Dict[str, int] = Counter()
        sizes: Dict[str, int] = Counter()
        for thing in gc.get_objects():
            # Not isinstance, which asks proxies for what they stand for.
            if not issubclass(type(thing), Tensor) or id(thing) in named:
                continue
            # Views hold no memory of their own.
            if thing.device.type == device_type and not thing._is_view():
                counts[describe_tensor(thing)] += 1
                sizes[describe_tensor(thing)] += tensor_bytes(thing)
        self.others = sum(sizes.values())
        self._sizes.update({f'{counts[kind]} x {kind}': size for kind, size in sizes.items()})

    def describe(self) -> str:
        """Sums, and the biggest of them by name or by shape."""
        biggest = sorted(self._sizes.items(), key=lambda item: -item[1])[:MOST_NAMED]
        told = [
            f'{name}{self._with(name)}: {format_bytes(size)}' for name, size in biggest if size > 0
        ]
        return (
            f'Weights, gradients and optimizer state take {format_bytes(self.fixed)}, other '
            f'tensors that Python can see {format_bytes(self.others)}. Biggest: {"; ".join(told)}.'
        )

    def _with(self, name: str) -> str:
        parts = self._parts.get(name, [])[1:]
        return f' with its {", ".join(parts)}' if parts else ''


def _named_tensors(runner: Any) -> Dict[int, Tuple[str, str, Tensor]]:
    """By identity: the parameter or buffer that a tensor belongs to, and what it is of it."""
    model = unwrap_model(runner.model)
    named: Dict[int, Tuple[str, str, Tensor]] = {}
    owners: Dict[int, str] = {}
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        owners[id(parameter)] = f'{name} {shape}'
        named[id(parameter)] = (owners[id(parameter)], 'weight', parameter)
        if parameter.grad is not None:
            named[id(parameter.grad)] = (owners[id(parameter)], 'gradient', parameter.grad)
    for name, buffer in model.named_buffers():
        named[id(buffer)] = (f'{name} {tuple(buffer.shape)}', 'buffer', buffer)
    for optimizer in _optimizers(runner.optim_wrapper):
        for parameter, state in optimizer.state.items():
            for part, value in state.items():
                if isinstance(value, Tensor) and id(parameter) in owners:
                    named[id(value)] = (owners[id(parameter)], part, value)
    return named


def _optimizers(wrapper: Any) -> List[torch.optim.Optimizer]:
    # A config has not been built yet.
    wrappers = list_optim_wrappers(wrapper)
    return [each.optimizer for each in wrappers if isinstance(each, OptimWrapper)]


def _advice(runner: Any, stage: str, in_use: Optional[int], fixed: Optional[int]) -> str:
    key = f'{stage}_dataloader.batch_size'
    size = _batch_size(getattr(runner, f'_{stage}_dataloader', None))
    levers = _levers(runner) if stage == 'train' else ''
    mostly_fixed = fixed is not None and in_use is not None and fixed > MOSTLY_FIXED * in_use
    if mostly_fixed:
        found = '' if size is None else f' (it is {size})'
        return (
            f'Most of it does not depend on {key}{found}: take an optimizer with less state, a '
            f'smaller model, or several devices{levers}.'
        )
    if size is None:
        return f'Try fewer samples in a batch{levers}.'
    if size == 1:
        return f'{key} is 1 already: take smaller samples{levers}.'
    return f'{key} is {size}: try {size // 2}{levers}.'


def _levers(runner: Any) -> str:
    counts = getattr(runner.optim_wrapper, '_accumulative_counts', 1)
    told = f', with optim_wrapper.accumulative_counts={2 * counts} for as many samples an update'
    told += "; or activation checkpointing (with_cp=True of the model's parts that have it)"
    if 'Amp' not in type(runner.optim_wrapper).__name__:
        told += '; or mixed precision (--amp)'
    return told


def _batch_size(loader: Any) -> Optional[int]:
    """What a data loader, or the config of one, has as its batch size."""
    if not isinstance(loader, Mapping):
        return getattr(getattr(loader, 'batch_sampler', None), 'batch_size', None)
    inner = loader.get('batch_sampler') or {}
    return loader.get('batch_size') or inner.get('batch_size')
