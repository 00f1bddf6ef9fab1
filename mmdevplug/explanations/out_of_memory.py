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

from mmdevplug.accelerators import enter_rank_device
from mmdevplug.errors import DeviceOutOfMemoryError, DevPlugError, first_line
from mmdevplug.utils.byte_sizes import format_bytes
from mmdevplug.utils.model import list_optim_wrappers, unwrap_model
from mmdevplug.utils.pytree import tensor_bytes

#: What the libraries say of the host's memory, and of a device's.
_HOST = re.compile(
    r"DefaultCPUAllocator|bad_alloc|cannot allocate memory|can't allocate memory", re.IGNORECASE
)
_DEVICE = re.compile(r'out of memory|RESOURCE_EXHAUSTED', re.IGNORECASE)
MOST_NAMED = 5
#: Above this part of the memory in use, a smaller batch does not help.
MOSTLY_FIXED = 0.75


@contextmanager
def explain_out_of_memory(runner: Any, stage: str) -> Iterator[None]:
    """Replace errors of full memory by a ``DeviceOutOfMemoryError`` that says what to try.

    Its stage is ``'train'``, ``'val'`` or ``'test'``: that batch size is named.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        place = out_of_memory_at(error)
        if place is None:
            raise
        raise DeviceOutOfMemoryError(_message(runner, stage, place, error)) from error


def out_of_memory_at(error: BaseException) -> Optional[str]:
    """Say whose memory an error is about: ``'host'``, ``'device'``, or None for other errors."""
    if isinstance(error, DevPlugError):
        return None
    text = str(error)
    if isinstance(error, MemoryError) or _HOST.search(text):
        return 'host'
    kind = getattr(torch.cuda, 'OutOfMemoryError', None)  # from torch 1.13 on
    known = kind is not None and isinstance(error, kind)
    return 'device' if known or _DEVICE.search(text) else None


def _message(runner: Any, stage: str, place: str, error: BaseException) -> str:
    accelerator, device = enter_rank_device()
    if place == 'host':
        device = torch.device('cpu')
        in_use: Optional[int] = psutil.Process().memory_info().rss
        total: Optional[int] = psutil.virtual_memory().total
    else:
        in_use = accelerator.memory_allocated(device)
        total = accelerator.memory_total(device)
    used = '' if in_use is None else f' with {format_bytes(in_use)} in use'
    of = '' if total is None else f' of {format_bytes(total)}'
    parts = [
        f'rank {runner.rank}: {device} has no memory left in {stage}{used}{of}: '
        f'{first_line(error)}'
    ]
    fixed = 0
    try:
        fixed, description = _describe_tensors(runner, device.type)
        parts.append(description)
    except MemoryError:
        parts.append('No memory remains to find out what holds it.')
    mostly_fixed = in_use is not None and fixed > MOSTLY_FIXED * in_use
    parts.append(_advice(runner, stage, mostly_fixed))
    return '\n'.join(parts)


def _describe_tensors(runner: Any, device_type: str) -> Tuple[int, str]:
    """Add up the bytes of weights, gradients and optimizer state, and describe all tensors.

    What autograd alone keeps for backward is not among them. Nothing is run on the device.
    """
    named = _named_tensors(runner)
    sizes: Dict[str, int] = Counter()
    parts: Dict[str, List[str]] = {}
    for owner, part, tensor in named.values():
        if tensor.device.type == device_type:
            sizes[owner] += tensor_bytes(tensor)
            parts.setdefault(owner, []).append(part)
    fixed = sum(sizes.values())
    counts: Dict[str, int] = Counter()
    others: Dict[str, int] = Counter()
    gc.unfreeze()  # an imported module may have made tensors
    for thing in gc.get_objects():
        # Not isinstance, which runs code of proxy objects.
        if not issubclass(type(thing), Tensor) or id(thing) in named:
            continue
        # Views hold no memory themselves.
        if thing.device.type == device_type and not thing._is_view():
            kind = _kind_of(thing)
            counts[kind] += 1
            others[kind] += tensor_bytes(thing)
    for owner, of_owner in parts.items():
        if len(of_owner) > 1:
            sizes[f'{owner} with its {", ".join(of_owner[1:])}'] = sizes.pop(owner)
    sizes.update({f'{counts[kind]} x {kind}': size for kind, size in others.items()})
    biggest = sorted(sizes.items(), key=lambda item: -item[1])[:MOST_NAMED]
    listed = '; '.join(f'{name}: {format_bytes(size)}' for name, size in biggest if size > 0)
    return fixed, (
        f'Weights, gradients and optimizer state take {format_bytes(fixed)}, other tensors that '
        f'Python can see {format_bytes(sum(others.values()))}. Biggest: {listed}.'
    )


def _kind_of(tensor: Tensor) -> str:
    """Name type, shape and dtype, and whether the tensor keeps the graph that computed it."""
    graph = ' with its graph' if tensor.grad_fn is not None else ''
    dtype = str(tensor.dtype).replace('torch.', '')
    return f'{type(tensor).__name__} {tuple(tensor.shape)} {dtype}{graph}'


def _named_tensors(runner: Any) -> Dict[int, Tuple[str, str, Tensor]]:
    """By identity: the parameter or buffer that a tensor belongs to, and what it is of it."""
    model = unwrap_model(runner.model)
    named: Dict[int, Tuple[str, str, Tensor]] = {}
    owners: Dict[int, str] = {}
    for name, parameter in model.named_parameters():
        owner = owners[id(parameter)] = f'{name} {tuple(parameter.shape)}'
        named[id(parameter)] = (owner, 'weight', parameter)
        gradient = parameter.grad  # kept, because reading it again may make another object
        if gradient is not None:
            named[id(gradient)] = (owner, 'gradient', gradient)
    for name, buffer in model.named_buffers():
        named[id(buffer)] = (f'{name} {tuple(buffer.shape)}', 'buffer', buffer)
    for wrapper in list_optim_wrappers(runner.optim_wrapper):
        if not isinstance(wrapper, OptimWrapper):
            continue  # a config that has not been built yet
        for parameter, state in wrapper.optimizer.state.items():
            for part, value in state.items():
                if isinstance(value, Tensor) and id(parameter) in owners:
                    named[id(value)] = (owners[id(parameter)], part, value)
    return named


def _advice(runner: Any, stage: str, mostly_fixed: bool) -> str:
    key = f'{stage}_dataloader.batch_size'
    size = batch_size_of(getattr(runner, f'_{stage}_dataloader', None))
    more = ''
    if stage == 'train':
        counts = 2 * getattr(runner.optim_wrapper, '_accumulative_counts', 1)
        more = f', with optim_wrapper.accumulative_counts={counts} for as many samples an update'
        more += "; or activation checkpointing (with_cp=True of the model's parts that have it)"
        if 'Amp' not in type(runner.optim_wrapper).__name__:
            more += '; or mixed precision (--amp)'
    if mostly_fixed:
        found = '' if size is None else f' (it is {size})'
        return (
            f'Most of it does not depend on {key}{found}: take an optimizer with less state, a '
            f'smaller model, or several devices{more}.'
        )
    if size is None:
        return f'Try fewer samples in a batch{more}.'
    if size == 1:
        return f'{key} is 1 already: take smaller samples{more}.'
    return f'{key} is {size}: try {size // 2}{more}.'


def batch_size_of(loader: Any) -> Optional[int]:
    """The batch size of a data loader, or of the config of one."""
    if not isinstance(loader, Mapping):
        return getattr(getattr(loader, 'batch_sampler', None), 'batch_size', None)
    inner = loader.get('batch_sampler') or {}
    return loader.get('batch_size') or inner.get('batch_size')
