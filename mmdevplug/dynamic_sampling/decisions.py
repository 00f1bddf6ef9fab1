"""Decide, on every rank alike and from the same numbers, whether to draw another round."""

from typing import List, NamedTuple, Sequence

from mmdevplug.config.dynamic_sampling import DynamicSamplingOptions
from mmdevplug.errors import SampleError

#: What follows a round.
GO_ON, FULL, SHORT = 'go on', 'full', 'short'
#: The most ranks that one message describes.
DESCRIBED = 8


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

    def after(self, offered: Sequence[int]) -> 'Tally':
        """Return what the next pool begins with if each rank gives some groups to this one."""
        rest = [held - given for held, given in zip(self.by_rank, offered)]
        return Tally(rest, [0] * len(rest), self.ended)


def decide(tally: Tally, options: DynamicSamplingOptions) -> str:
    """Decide whether all ranks draw once more.

    It depends on what all ranks have together, never on what one of them has: so none stops
    alone while the others wait for it.
    """
    if tally.valid >= options.groups:
        return FULL
    if all(tally.ended) or tally.rounds > options.max_resamples:
        return SHORT
    return GO_ON


def offers(tally: Tally, count: int) -> List[int]:
    """Return how many of ``count`` groups each rank gives: old ones first, then in rank order."""
    old = _fill(tally.old, count)
    new = _fill(tally.new, count - sum(old))
    return [one + other for one, other in zip(old, new)]


def _fill(counts: Sequence[int], missing: int) -> List[int]:
    taken = []
    for count in counts:
        taken.append(min(count, missing))
        missing -= taken[-1]
    return taken


def round_name(number: int) -> str:
    """Name a round, counted from 0."""
    return 'initial' if number == 0 else f'resample {number}'


def first_few(items: Sequence[str], more: str = '') -> str:
    """Join the first items, and count the others, which are called ``more``."""
    others = len(items) - DESCRIBED
    return ', '.join(items[:DESCRIBED]) + (f', and {others} more{more}' if others > 0 else '')


def too_few(tally: Tally, options: DynamicSamplingOptions) -> SampleError:
    """Make the error for a pool that cannot be filled."""
    size, target = options.per_group, options.target
    found = tally.valid * size
    by_rank = [f'rank {rank}: {count * size}' for rank, count in enumerate(tally.by_rank)]
    ended = [str(rank) for rank, over in enumerate(tally.ended) if over]
    if not ended:
        data = 'no data have ended'
    elif all(tally.ended):
        data = 'the data of all ranks have ended'
    else:
        data = f'the data of rank(s) {first_few(ended)} have ended'
    return SampleError(
        f'DynamicSampler: {found} of target={target} samples, {target - found} too few, after '
        f'{max(0, tally.rounds - 1)} resample(s) of max_resamples={options.max_resamples}; '
        f'{data}. Valid samples: {first_few(by_rank, " ranks")}. In this pool '
        f'{tally.generated * size} samples were generated and {sum(tally.new) * size} of them '
        f'valid. Raise max_resamples or generate more in a round, check is_valid, or set '
        f"on_short='fewer' or 'repeat'."
    )
