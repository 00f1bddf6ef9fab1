"""Report what a sampler did for one pool."""

from typing import NamedTuple, Optional, Tuple


class SamplingReport(NamedTuple):
    """How one pool was filled; numbers are samples of all ranks unless said otherwise.

    Attributes:
        pool (int): Its number, from 1.
        target (int): What was asked for.
        samples (int): What all ranks got together; below ``target`` after ``on_short='fewer'``.
        resamples (int): Rounds after the first.
        generated (int): What all ranks generated for it.
        valid (int): Those of them that were valid.
        reused (int): Valid ones that were left over from pools before.
        surplus (int): Valid ones that are left for the next pool.
        by_rank (Tuple[int]): What each rank had to give, whether drawn for this pool or before.
        slice (Tuple[int, int]): Which part of the pool this rank got, as ``[begin:end]``.
        short (str, optional): ``'fewer'`` or ``'repeat'`` if there were too few.
    """

    pool: int
    target: int
    samples: int
    resamples: int
    generated: int
    valid: int
    reused: int
    surplus: int
    by_rank: Tuple[int, ...]
    slice: Tuple[int, int]
    short: Optional[str] = None

    @property
    def kept(self) -> float:
        """The share of what was generated that was valid; 0 if nothing was."""
        return self.valid / self.generated if self.generated else 0.0
