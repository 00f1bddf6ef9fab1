"""Make the device map that HF accelerate would, for devices of any type."""

import logging
from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence

import torch
from torch import nn

from mmdevplug.errors import PlacementError, first_line

from .blocks import Unit
from .walk_modules import named_tensors, nearest

#: For accelerate, where a device has no limit.
_PLENTY = 2**60


def accelerate_map(
    model: nn.Module,
    devices: Sequence[str],
    limits: Mapping[str, int],
    classes: Sequence[str],
    units: Sequence[Unit],
    dtype: Optional[torch.dtype] = None,
) -> Dict[str, str]:
    """Map every tensor as ``get_balanced_memory`` and ``infer_auto_device_map`` do.

    They count devices of the types that accelerate knows and that are present. Indices stand for
    the devices here, so that neither matters. ``classes`` are not split.
    """
    try:
        from accelerate.utils import infer_auto_device_map
    except ImportError as error:
        raise PlacementError(
            f'strategy "auto" needs HF accelerate ({first_line(error)}): pip install accelerate '
            f'torch=={torch.__version__}, or use strategy "balanced".'
        ) from error
    keys: List[Any] = [name if name == 'cpu' else i for i, name in enumerate(devices)]
    memory = {key: limits.get(name, _PLENTY) for key, name in zip(keys, devices)}
    try:
        with _quiet():
            memory = balanced_memory(model, memory, classes, dtype)
            found = infer_auto_device_map(
                model, memory, no_split_module_classes=list(classes), dtype=dtype
            )
    except Exception as error:
        # It asserts, indexes and divides on models it does not expect.
        raise PlacementError(
            f'HF accelerate fails on {type(model).__name__} with {type(error).__name__}: '
            f'{first_line(error)}. Use strategy "balanced".'
        ) from error
    left = [name or 'the whole model' for name, device in found.items() if device not in keys]
    if left:
        raise PlacementError(
            f'HF accelerate finds no room on {", ".join(devices)} for {", ".join(left[:4])}'
            f'{" and more" if len(left) > 4 else ""}.'
        )
    named = {name: devices[keys.index(device)] for name, device in found.items()}
    return _complete(model, named, units)


def balanced_memory(
    model: nn.Module,
    memory: Mapping[Any, int],
    classes: Sequence[str],
    dtype: Optional[torch.dtype] = None,
) -> Dict[Any, int]:
    """The limits of accelerate's ``get_balanced_memory``, whatever devices are present.

    All but the last device may hold an equal share and 1.25 times the larger of a block that is
    not split and the mean leaf.
    """
    from accelerate.utils.modeling import compute_module_sizes, get_module_leaves

    memory = dict(memory)
    accelerators = [key for key, size in memory.items() if key != 'cpu' and size > 0]
    if len(accelerators) < 2:
        return memory
    sizes = compute_module_sizes(model, dtype=dtype)
    kinds = {name: type(module).__name__ for name, module in model.named_modules() if name}
    # Of each class, the first that holds anything.
    firsts: Dict[str, int] = {}
    for name, size in sizes.items():
        if kinds.get(name) in classes:
            firsts.setdefault(kinds[name], size)
    leaves = set(get_module_leaves(sizes))
    inner = {name: size for name, size in sizes.items() if name not in leaves}
    ends = get_module_leaves(inner)
    mean = int(sum(inner[name] for name in ends) / max(len(ends), 1))
    share = sizes[''] // len(accelerators) + int(1.25 * max([mean, *firsts.values()]))
    for key in accelerators[:-1]:
        memory[key] = min(share, memory[key])
    return memory


def _complete(model: nn.Module, found: Mapping[str, str], units: Sequence[Unit]) -> Dict[str, str]:
    """Add what accelerate leaves out: buffers that a split module holds itself."""
    found = dict(found)
    for name, _ in named_tensors(model):
        if nearest(name, found) is None:
            owner = name.rpartition('.')[0]
            beside = [u.name for u in units if not owner or u.name.startswith(f'{owner}.')]
            known = [key for key in (nearest(other, found) for other in beside) if key is not None]
            found[name] = found[known[0]] if known else next(iter(found.values()))
    return found


@contextmanager
def _quiet() -> Iterator[None]:
    """Without accelerate's warning that each device is not available."""
    logger = logging.getLogger('accelerate.utils.modeling')
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
