"""Draw one rank's part of a round, and keep the groups that are valid."""

from typing import Any, Callable, List, NamedTuple, Optional

import numpy as np
import torch
from torch import Tensor

from mmdevplug.accelerators.move_nested import to_device
from mmdevplug.errors import SampleError


class Drawn(NamedTuple):
    """What one rank drew.

    Attributes:
        groups (List[Any]): The valid ones, on the host: lists of samples, or samples if a group
            is one sample.
        generated (int): How many groups there were.
        ended (bool): Whether this rank's data have ended.
        error (Exception, optional): What went wrong.
        where (str): In which function.
    """

    groups: List[Any]
    generated: int = 0
    ended: bool = False
    error: Optional[Exception] = None
    where: str = ''


def draw(
    generate: Callable[[], List[Any]], is_valid: Callable[[Any], Any], per_group: int
) -> Drawn:
    """Draw once; an error is returned, because the other ranks wait for this one.

    Args:
        generate (callable): See :class:`DynamicSampler`.
        is_valid (callable): See :class:`DynamicSampler`.
        per_group (int): Samples of a group.
    """
    try:
        samples = generate()
    except StopIteration:
        return Drawn([], ended=True)
    except Exception as error:
        return Drawn([], error=error, where='generate()')
    try:
        # Values are about to be read: one call for all, and so one execution of a lazy device.
        groups = to_device(_in_groups(samples, per_group), 'cpu')
    except Exception as error:
        return Drawn([], error=error, where='generate()')
    try:
        valid = [group for index, group in enumerate(groups) if _judge(is_valid, group, index)]
    except Exception as error:
        return Drawn([], error=error, where='is_valid()')
    return Drawn(valid, len(groups))


def _in_groups(samples: Any, per_group: int) -> List[Any]:
    if type(samples) not in (list, tuple):
        raise SampleError(
            f'generate() returned a {type(samples).__name__}; expected a list of samples, [] for '
            f'none. A batch is no list: take it apart first.'
        )
    if len(samples) % per_group:
        raise SampleError(
            f'generate() returned {len(samples)} samples, which is no multiple of '
            f'per_group={per_group}. Groups stay whole: return all samples of each.'
        )
    if per_group == 1:
        return list(samples)
    return [list(samples[i : i + per_group]) for i in range(0, len(samples), per_group)]


def _judge(is_valid: Callable[[Any], Any], group: Any, index: int) -> bool:
    try:
        found = is_valid(group)
    except StopIteration as error:
        # As such it would end a loop without a word.
        raise SampleError(f'is_valid() raised StopIteration for group {index}.') from error
    if isinstance(found, (bool, np.bool_)):
        return bool(found)
    if isinstance(found, Tensor) and found.numel() == 1 and found.dtype == torch.bool:
        return bool(found)
    if isinstance(found, np.ndarray) and found.size == 1 and found.dtype == np.bool_:
        return bool(found)
    raise SampleError(
        f'is_valid() returned {_short(found)} for group {index}; expected True or False, or a '
        f'tensor of one of them.'
    )


def _short(value: Any) -> str:
    if isinstance(value, (Tensor, np.ndarray)):
        kind = 'a tensor' if isinstance(value, Tensor) else 'an array'
        return f'{kind} of shape {tuple(value.shape)} and dtype {value.dtype}'
    return f'{value!r:.80} ({type(value).__name__})'
