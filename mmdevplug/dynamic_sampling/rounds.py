"""Draw one rank's part of a round, exchange counts between ranks, and end together."""

from typing import Any, Callable, Dict, List, NamedTuple, Optional

import numpy as np
from torch import Tensor, distributed as torch_dist

from mmdevplug.accelerators.move_nested import to_device
from mmdevplug.config.dynamic_sampling import DynamicSamplingOptions
from mmdevplug.distributed.byte_exchange import gather_json
from mmdevplug.distributed.waiting import wait_for_everyone
from mmdevplug.errors import RankFailedError, SampleError, first_line
from mmdevplug.fault_tolerance.failure import enter_phase
from mmdevplug.utils.annotations import AnyGroup
from mmdevplug.utils.torch_compat import get_global_rank

from .decisions import DESCRIBED, Tally, round_name


class Drawn(NamedTuple):
    """What one rank drew."""

    #: The valid ones, on the host: lists of samples, or samples if a group is one sample.
    groups: List[Any]
    generated: int = 0  # number of groups, valid or not
    ended: bool = False  # whether this rank's data have ended
    error: Optional[Exception] = None  # raised by a function of the user
    where: str = ''  # in which function


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


#: What must be the same on all ranks, or they decide differently.
_COMMON = ('target', 'per_group', 'max_resamples', 'on_short')


class Rounds:
    """Exchange the counts of a process group's ranks; ``group=None`` for all ranks."""

    def __init__(self, options: DynamicSamplingOptions, group: AnyGroup) -> None:
        self._options, self._group = options, group
        self.world_size, self.rank = 1, 0
        if torch_dist.is_available() and torch_dist.is_initialized():
            self.rank = torch_dist.get_rank(group)
            if self.rank < 0:
                raise SampleError(
                    f'DynamicSampler: rank {torch_dist.get_rank()} is not in the process group '
                    f'that it was given. Make the sampler on the ranks of the group alone.'
                )
            self.world_size = torch_dist.get_world_size(group)
        options.check_ranks(self.world_size)

    def exchange(self, number: int, held: List[int], drawn: Drawn, tally: Tally) -> Tally:
        """Exchange counts and return the new tally; raise if any rank has an error.

        ``held`` counts the groups of this rank that are left over, and those drawn for this pool.
        """
        name = round_name(number)
        mine = dict(
            settings=[getattr(self._options, name) for name in _COMMON],
            held=held,
            generated=drawn.generated,
            ended=drawn.ended,
            error=_describe(drawn, name),
        )
        everyone = self._gather(mine, name) if self.world_size > 1 else [mine]
        if drawn.error is not None:
            raise drawn.error
        self._raise_for_others([each['error'] for each in everyone])
        self._refuse_other_settings([each['settings'] for each in everyone])
        return Tally(
            old=[each['held'][0] for each in everyone],
            new=[each['held'][1] for each in everyone],
            ended=[each['ended'] for each in everyone],
            rounds=tally.rounds + 1,
            generated=tally.generated + sum(each['generated'] for each in everyone),
        )

    def _gather(self, mine: Dict, name: str) -> List[Dict]:
        if self._group is None or self._group is torch_dist.group.WORLD:
            enter_phase(f'sampling, {name}: waiting for the others')
            wait_for_everyone(f'sampling, {name}', self._options.sampler.timeout)
        enter_phase(f'sampling, {name}: exchanging counts')
        return gather_json(mine, self._group)

    def _raise_for_others(self, errors: List[Optional[str]]) -> None:
        failed = [
            f'{self._name(rank)} failed in {text}'
            for rank, text in enumerate(errors)
            if text is not None
        ]
        if failed:
            more = f'; and {len(failed) - DESCRIBED} more' if len(failed) > DESCRIBED else ''
            raise RankFailedError(
                f'{self._name(self.rank)} stops because {"; ".join(failed[:DESCRIBED])}{more}'
            )

    def _refuse_other_settings(self, settings: List[List[Any]]) -> None:
        for rank, theirs in enumerate(settings):
            for name, value, first in zip(_COMMON, theirs, settings[0]):
                if value != first:
                    raise SampleError(
                        f'DynamicSampler: {name}={value!r} on {self._name(rank)}, but {first!r} '
                        f'on {self._name(0)}; expected the same on all ranks.'
                    )

    def _name(self, rank: int) -> str:
        if self.world_size == 1 or self._group is None:
            return f'rank {rank} of {self.world_size}'
        return f'rank {get_global_rank(self._group, rank)} of {torch_dist.get_world_size()}'


def _describe(drawn: Drawn, name: str) -> Optional[str]:
    error = drawn.error
    if error is None:
        return None
    text = f'{type(error).__name__}: {first_line(error)}'[:1000]
    return f'{drawn.where}, {name}: {text}'
