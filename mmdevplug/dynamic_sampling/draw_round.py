"""Draw one rank's part of a round, and keep the groups that are valid."""

from typing import Any, Callable, List, NamedTuple, Optional

import numpy as np
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
        error (Exception, optional): Raised by a function of the user.
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
    """Draw once; an error is returned, because the other ranks wait for this one."""
    where = 'generate()'
    try:
        try:
            samples = generate()
        except StopIteration:
            return Drawn([], ended=True)
        # Values are about to be read: one call for all, and so one execution of a lazy device.
        groups = to_device(_in_groups(samples, per_group), 'cpu')
        where = 'is_valid()'
        valid = [group for index, group in enumerate(groups) if _judge(is_valid, group, index)]
    except Exception as error:
        return Drawn([], error=error, where=where)
    return Drawn(valid, len(groups))


def _in_groups(samples: Any, per_group: int) -> List[Any]:
    if type(samples) not in (list, tuple):
        raise SampleError(
            f'generate() returned a {type(samples).__name__}; expected a list of samples, [] for '
            f'none. A batch is no list: split it into samples first.'
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
        # It would end a loop without a message.
        raise SampleError(f'is_valid() raised StopIteration for group {index}.') from error
    if isinstance(found, (bool, np.bool_)):
        return bool(found)
    if isinstance(found, (Tensor, np.ndarray)):
        if str(found.dtype) in ('torch.bool', 'bool') and len(found.reshape(-1)) == 1:
            return bool(found)
        kind = 'a tensor' if isinstance(found, Tensor) else 'an array'
        shown = f'{kind} of shape {tuple(found.shape)} and dtype {found.dtype}'
    else:
        shown = f'{found!r:.80} ({type(found).__name__})'
    raise SampleError(
        f'is_valid() returned {shown} for group {index}; expected True or False, or a tensor of '
        f'one of them.'
    )
