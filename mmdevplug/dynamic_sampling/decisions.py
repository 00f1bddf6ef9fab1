"""Decide, on every rank alike and from the same numbers, whether to draw another round."""

from typing import List, NamedTuple, Sequence

from mmdevplug.errors import SampleError

from .settings import Settings

#: What follows a round.
GO_ON, FULL, SHORT = 'go on', 'full', 'short'
#: So many ranks are described in one message.
DESCRIBED = 8


class Tally(NamedTuple):
    """What all ranks know of the pool that is being filled; the same on all of them.

    Attributes:
        old (List[int]): Valid groups on each rank that were left over from the pool before.
        new (List[int]): Valid groups on each rank that were drawn for this one.
        ended (List[bool]): Whether the data of each rank have ended.
        rounds (int): How often all ranks have drawn for this pool.
        generated (int): Groups that all ranks have generated for it.
    """

    old: List[int]
    new: List[int]
    ended: List[bool]
    rounds: int = 0
    generated: int = 0

    @property
    def valid(self) -> int:
        """Valid groups on all ranks."""
        return sum(self.old) + sum(self.new)

    def after(self, offered: Sequence[int]) -> 'Tally':
        """What the next pool begins with, once each rank has given some groups to this one."""
        left = [old + new - gone for old, new, gone in zip(self.old, self.new, offered)]
        return Tally(left, [0] * len(left), self.ended)


def first_tally(world_size: int) -> Tally:
    """Nobody has anything yet."""
    return Tally([0] * world_size, [0] * world_size, [False] * world_size)


def decide(tally: Tally, settings: Settings) -> str:
    """Whether all ranks draw once more.

    It depends on what all ranks have together, never on what one of them has: so none stops
    alone while the others wait for it.
    """
    if tally.valid >= settings.groups:
        return FULL
    if all(tally.ended) or tally.rounds > settings.max_resamples:
        return SHORT
    return GO_ON


def offers(tally: Tally, wanted: int) -> List[int]:
    """How many groups each rank gives to a pool: those left over first, then in rank order.

    Args:
        tally (Tally): What there is.
        wanted (int): Groups of the pool, at most as many as there are.
    """
    old = _filled(tally.old, wanted)
    new = _filled(tally.new, wanted - sum(old))
    return [one + other for one, other in zip(old, new)]


def _filled(counts: Sequence[int], wanted: int) -> List[int]:
    taken = []
    for count in counts:
        taken.append(min(count, wanted))
        wanted -= taken[-1]
    return taken


def round_name(number: int) -> str:
    """What a round is called, counted from 0."""
    return 'initial' if number == 0 else f'resample {number}'


def too_few(tally: Tally, settings: Settings) -> SampleError:
    """What to raise where a pool cannot be filled."""
    size = settings.per_group
    found, target = tally.valid * size, settings.target
    counts = [(old + new) * size for old, new in zip(tally.old, tally.new)]
    by_rank = ', '.join(f'rank {rank}: {n}' for rank, n in enumerate(counts[:DESCRIBED]))
    if len(counts) > DESCRIBED:
        by_rank += f', and {len(counts) - DESCRIBED} more ranks'
    ended = [rank for rank, over in enumerate(tally.ended) if over]
    if not ended:
        data = 'no data have ended'
    elif len(ended) == len(counts):
        data = 'the data of all ranks have ended'
    else:
        more = '' if len(ended) <= DESCRIBED else f' and {len(ended) - DESCRIBED} more'
        named = ', '.join(map(str, ended[:DESCRIBED]))
        data = f'the data of rank(s) {named}{more} have ended'
    resamples = max(0, tally.rounds - 1)
    return SampleError(
        f'DynamicSampler: {found} of target={target} samples, {target - found} too few, after '
        f'{resamples} resample(s) of max_resamples={settings.max_resamples}; {data}. Valid '
        f'samples: {by_rank}. In this pool {tally.generated * size} samples were generated and '
        f'{sum(tally.new) * size} of them valid. Raise max_resamples or generate more in a round, '
        f"check is_valid, or set on_short='fewer' or 'repeat'."
    )
