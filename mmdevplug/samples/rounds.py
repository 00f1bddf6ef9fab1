"""Draw one rank's part of a round, and decide on all ranks alike whether another one follows."""

from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence

import numpy as np
from torch import Tensor, distributed as torch_dist

from mmdevplug.accelerators.move_nested import to_device
from mmdevplug.distributed.byte_exchange import gather_json
from mmdevplug.distributed.waiting import wait_for_everyone
from mmdevplug.errors import RankFailedError, SampleError, first_line
from mmdevplug.fault_tolerance.failure import enter_phase
from mmdevplug.utils.annotations import AnyGroup
from mmdevplug.utils.torch_compat import get_global_rank

#: What follows a round.
GO_ON, FULL, SHORT = 'go on', 'full', 'short'
#: The most ranks that one message describes.
DESCRIBED = 8


class Pool(NamedTuple):
    """What all ranks want; the same on all of them, or they decide differently."""

    target: int  # samples of all ranks together
    per_group: int
    max_resamples: int
    on_short: str

    @property
    def groups(self) -> int:
        """Groups of all ranks together."""
        return self.target // self.per_group

    def check(self, world_size: int) -> None:
        """Refuse values that do not work, and a target that ranks cannot share evenly."""
        for name, least in (('target', 1), ('per_group', 1), ('max_resamples', 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise SampleError(
                    f'DynamicSampler: {name}={value!r}: expected a whole number of at least '
                    f'{least}.'
                )
        if self.on_short not in ('error', 'fewer'):
            raise SampleError(
                f"DynamicSampler: on_short={self.on_short!r}: expected 'error' or 'fewer'."
            )
        whole = self.per_group * world_size
        if self.target % whole:
            raise SampleError(
                f'DynamicSampler: target={self.target} samples in groups of '
                f'per_group={self.per_group} cannot be shared evenly by {world_size} rank(s), '
                f'because groups stay whole. Take a multiple of {whole}, such as '
                f'{-(-self.target // whole) * whole}.'
            )


class Tally(NamedTuple):
    """What all ranks know of the pool that is being filled; the same on all of them."""

    old: List[int]  # valid groups on each rank that were left over from the pool before
    new: List[int]  # valid groups on each rank that were drawn for this one
    ended: List[bool]  # whether the data of each rank have ended
    rounds: int = 0  # how often all ranks have drawn for this pool
    generated: int = 0  # groups that all ranks have generated for it

    @classmethod
    def empty(cls, world_size: int) -> 'Tally':
        """Begin with no groups on any rank."""
        return cls([0] * world_size, [0] * world_size, [False] * world_size)

    @property
    def by_rank(self) -> List[int]:
        """Valid groups on each rank."""
        return [old + new for old, new in zip(self.old, self.new)]

    @property
    def valid(self) -> int:
        """Valid groups on all ranks."""
        return sum(self.by_rank)

    def offers(self, count: int) -> List[int]:
        """How many of ``count`` groups each rank gives: old ones first, then in rank order."""
        given = [0] * len(self.old)
        for held in (self.old, self.new):
            for rank, more in enumerate(held):
                more = min(more, count)
                given[rank] += more
                count -= more
        return given

    def after(self, offered: Sequence[int]) -> 'Tally':
        """Return what the next pool begins with if each rank gives some groups to this one."""
        rest = [held - given for held, given in zip(self.by_rank, offered)]
        return Tally(rest, [0] * len(rest), self.ended)


def decide(tally: Tally, pool: Pool) -> str:
    """Decide whether all ranks draw once more.

    It depends on what all ranks have together, never on what one of them has: so none stops
    alone while the others wait for it.
    """
    if tally.valid >= pool.groups:
        return FULL
    if all(tally.ended) or tally.rounds > pool.max_resamples:
        return SHORT
    return GO_ON


def round_name(number: int) -> str:
    """Name a round, counted from 0."""
    return 'initial' if number == 0 else f'resample {number}'


def first_few(items: Sequence[str]) -> str:
    """Join the first items, and count the others."""
    others = len(items) - DESCRIBED
    return ', '.join(items[:DESCRIBED]) + (f', and {others} more' if others > 0 else '')


def too_few(tally: Tally, pool: Pool) -> SampleError:
    """Make the error for a pool that cannot be filled."""
    size, found = pool.per_group, tally.valid * pool.per_group
    by_rank = [f'rank {rank}: {count * size}' for rank, count in enumerate(tally.by_rank)]
    ended = [str(rank) for rank, over in enumerate(tally.ended) if over]
    of_ranks = 'all ranks' if all(tally.ended) else f'rank(s) {first_few(ended)}'
    data = f'the data of {of_ranks} have ended' if ended else 'no data have ended'
    return SampleError(
        f'DynamicSampler: {found} of target={pool.target} samples, {pool.target - found} too few, '
        f'after {max(0, tally.rounds - 1)} resample(s) of max_resamples={pool.max_resamples}; '
        f'{data}. Valid samples: {first_few(by_rank)}. In this pool '
        f'{tally.generated * size} samples were generated and {sum(tally.new) * size} of them '
        f'valid. Raise max_resamples or generate more in a round, check is_valid, or set '
        f"on_short='fewer'."
    )


class Drawn(NamedTuple):
    """What one rank drew."""

    #: The valid ones, on the host: lists of samples, or samples if a group is one sample.
    groups: List[object]
    generated: int = 0  # number of groups, valid or not
    ended: bool = False  # whether this rank's data have ended
    error: Optional[Exception] = None  # raised by a function of the user
    where: str = ''  # in which function


def draw(
    generate: Callable[[], Sequence[object]], is_valid: Callable[[object], object], per_group: int
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


def _in_groups(samples: Sequence[object], per_group: int) -> List[object]:
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


def _judge(is_valid: Callable[[object], object], group: object, index: int) -> bool:
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
        shown = f'values of shape {tuple(found.shape)} and dtype {found.dtype}'
    else:
        shown = f'{found!r:.80} ({type(found).__name__})'
    raise SampleError(
        f'is_valid() returned {shown} for group {index}; expected True or False, or a tensor of '
        f'one of them.'
    )


class Rounds:
    """Exchange the counts of a process group's ranks; ``group=None`` for all ranks."""

    def __init__(self, pool: Pool, group: AnyGroup) -> None:
        self._pool, self._group = pool, group
        self.world_size, self.rank = 1, 0
        if torch_dist.is_available() and torch_dist.is_initialized():
            self.rank = torch_dist.get_rank(group)
            if self.rank < 0:
                raise SampleError(
                    f'DynamicSampler: rank {torch_dist.get_rank()} is not in the process group '
                    f'that it was given. Make the sampler on the ranks of the group alone.'
                )
            self.world_size = torch_dist.get_world_size(group)
        pool.check(self.world_size)

    def exchange(self, number: int, held: List[int], drawn: Drawn, tally: Tally) -> Tally:
        """Exchange counts and return the new tally; raise if any rank has an error.

        ``held`` counts the groups of this rank that are left over, and those drawn for this pool.
        """
        name, error = round_name(number), None
        if drawn.error is not None:
            error = f'{type(drawn.error).__name__}: {first_line(drawn.error)}'[:1000]
            error = f'{drawn.where}, {name}: {error}'
        mine = dict(
            pool=list(self._pool),
            held=held,
            generated=drawn.generated,
            ended=drawn.ended,
            error=error,
        )
        everyone: List[Dict[str, Any]] = [mine]
        if self.world_size > 1:
            everyone = self._gather(mine, name)
        if drawn.error is not None:
            raise drawn.error
        failed = [
            f'{self._name(rank)} failed in {each["error"]}'
            for rank, each in enumerate(everyone)
            if each['error'] is not None
        ]
        if failed:
            raise RankFailedError(f'{self._name(self.rank)} stops because {first_few(failed)}')
        for rank, each in enumerate(everyone):
            for field, value, first in zip(Pool._fields, each['pool'], everyone[0]['pool']):
                if value != first:
                    raise SampleError(
                        f'DynamicSampler: {field}={value!r} on {self._name(rank)}, but {first!r} '
                        f'on {self._name(0)}; expected the same on all ranks.'
                    )
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
            wait_for_everyone(f'sampling, {name}')
        enter_phase(f'sampling, {name}: exchanging counts')
        return gather_json(mine, self._group)

    def _name(self, rank: int) -> str:
        if self.world_size == 1 or self._group is None:
            return f'rank {rank} of {self.world_size}'
        return f'rank {get_global_rank(self._group, rank)} of {torch_dist.get_world_size()}'
