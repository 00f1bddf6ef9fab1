"""Decide which rank gets which samples of a pool, and which of them have to travel."""

from typing import Dict, List, NamedTuple, Optional, Sequence

from mmdevplug.errors import SampleError


class Slice(NamedTuple):
    """Consecutive samples.

    Attributes:
        begin (int): The first.
        end (int): One after the last.
    """

    begin: int
    end: int

    @property
    def size(self) -> int:
        """Number of samples."""
        return max(0, self.end - self.begin)

    def overlap(self, other: 'Slice') -> 'Slice':
        """What two slices have in common; of size 0 if that is nothing."""
        return Slice(max(self.begin, other.begin), min(self.end, other.end))


def holdings(counts: Sequence[int]) -> List[Slice]:
    """The part of the pool that each rank has.

    Args:
        counts (Sequence[int]): Samples of each rank.
    """
    found, begin = [], 0
    for count in counts:
        found.append(Slice(begin, begin + count))
        begin += count
    return found


def slices_of(counts: Sequence[int], per_rank: Optional[int] = None) -> List[Slice]:
    """The part of the pool that each rank gets.

    Args:
        counts (Sequence[int]): Samples of each rank.
        per_rank (int, optional): Samples for each rank. Defaults to None: as even as may be.

    Raises:
        SampleError: If there are not enough samples.

    Examples:
        >>> [each.size for each in slices_of([5, 0, 2])]
        [3, 2, 2]
    """
    world_size, total = len(counts), sum(counts)
    if per_rank is None:
        even, more = divmod(total, world_size)
        return holdings([even + (rank < more) for rank in range(world_size)])
    if total < per_rank * world_size:
        told = ', '.join(f'rank {rank} has {count}' for rank, count in enumerate(counts[:8]))
        raise SampleError(
            f'balance_samples(): per_rank={per_rank} on {world_size} ranks needs '
            f'{per_rank * world_size} samples, but the pool has {total}: {told}'
            f'{", ..." if world_size > 8 else ""}. Make more samples first, or leave per_rank out '
            f'to share out what there is.'
        )
    return holdings([per_rank] * world_size)


def parts_for(mine: Slice, slices: Sequence[Slice]) -> Dict[int, Slice]:
    """The parts of what one rank has that lie in the slices of ranks.

    Args:
        mine (Slice): What that rank has.
        slices (Sequence[Slice]): What each rank gets.

    Returns:
        Dict[int, Slice]: For each rank that gets some, in the order of ranks.
    """
    found = {rank: mine.overlap(other) for rank, other in enumerate(slices)}
    return {rank: part for rank, part in found.items() if part.size}
