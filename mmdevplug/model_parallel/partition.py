"""Find the best split of a sequence into contiguous parts, one for each device.

First the largest load relative to its device is minimized, then the imbalance, both by bisection
over the bound, and the smallest load is raised to 0.7 of the ideal where that is possible; then,
among the splits within the bounds, the cost of the cuts is minimized. This is the linear
partition problem (Skiena, The Algorithm Design Manual, 8.5) with bins of unequal size. Each check
marks all places at which a part can end: filling device after device would miss splits in which no
device is empty.
"""

from typing import Any, Callable, Iterator, List, Optional, Sequence, Tuple

import numpy as np

#: The part of the ideal up to which the smallest load matters more than the cost of the cuts.
_ENOUGH = 0.7
_TOLERANCE = 1e-13  # relative: a byte of ten terabytes


class Partition:
    """Splits a sequence of sizes, in bytes.

    ``weights`` are the capacities of the devices, in any unit and above 0; ``limits`` the most
    bytes for each device, by default without limit; ``cut_costs`` those of a cut before each
    place, by default 0. With ``allow_empty``, a device may stay empty.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[float],
        limits: Optional[Sequence[float]] = None,
        cut_costs: Optional[Sequence[float]] = None,
        allow_empty: bool = False,
    ) -> None:
        self.sizes, self.weights = sizes, weights
        self.limits = [float('inf')] * len(weights) if limits is None else limits
        self.costs = [0.0] * len(sizes) if cut_costs is None else cut_costs
        self.allow_empty = allow_empty
        self.ends = np.cumsum([0, *sizes], dtype=np.int64)
        self.ideal = self.ends[-1] / sum(weights)

    def best(self) -> Optional[List[int]]:
        """Find the end of each part, e.g. ``[3, 5]`` for ``[0:3]`` and ``[3:5]``.

        None if no split keeps the limits.
        """
        most = self.ends[-1] / min(self.weights)
        if not self._possible(0.0, most):
            return None
        below = self.ideal * (1 - 10 * _TOLERANCE)
        most = self._bisect(most, below, lambda bound: self._possible(0.0, bound))
        return self._best_of_used(most) if self.allow_empty else self._most_even(most)

    def loads(self, ends: Sequence[int]) -> List[int]:
        """The bytes of each part."""
        return np.diff(self.ends[[0, *ends]]).tolist()

    def _windows(self, least: float, most: float) -> Iterator[Tuple[np.ndarray, np.ndarray]]:
        """For each device: the first start of a part with each end, and one after the last."""
        places = np.arange(len(self.ends))
        slack = 4 * _TOLERANCE * self.ideal
        for weight, limit in zip(self.weights, self.limits):
            upper = int(min(limit, (most + slack) * weight, self.ends[-1]))
            lower = int(np.ceil((least - slack) * weight))
            first = np.searchsorted(self.ends, self.ends - upper)
            after = places
            if lower > 0:
                after = np.minimum(np.searchsorted(self.ends, self.ends - lower, 'right'), places)
            yield first, after

    def _possible(self, least: float, most: float) -> bool:
        """Whether a split keeps every load, relative to the device's weight, within bounds."""
        counts = np.zeros(len(self.ends) + 1, dtype=np.int64)
        reached = np.arange(len(self.ends)) == 0
        for first, after in self._windows(least, most):
            np.cumsum(reached, out=counts[1:])
            within = counts[after] > counts[first]
            reached = within | reached if self.allow_empty else within
        return bool(reached[-1])

    def _cheapest(self, least: float, most: float, costs: Any) -> List[int]:
        """The split within bounds whose cuts cost least; an empty part costs 1."""
        cheapest = np.full(len(self.ends), np.inf)
        cheapest[0] = 0.0
        chosen = []
        counts = np.zeros(len(self.ends) + 1, dtype=np.int64)
        for first, after in self._windows(least, most):
            np.cumsum(cheapest < np.inf, out=counts[1:])
            now, starts = np.full(len(self.ends), np.inf), np.arange(len(self.ends))
            for end in np.flatnonzero(counts[after] > counts[first]):
                # The last of equals.
                window = cheapest[first[end] : after[end]][::-1]
                starts[end] = after[end] - 1 - window.argmin()
                now[end] = cheapest[starts[end]] + costs[end]
            if self.allow_empty:
                empty = np.flatnonzero(cheapest + 1 < now)
                now[empty], starts[empty] = cheapest[empty] + 1, empty
            cheapest = now
            chosen.append(starts)
        ends = [len(self.ends) - 1]
        for starts in reversed(chosen[1:]):
            ends.append(int(starts[ends[-1]]))
        return ends[::-1]

    def _best_of_used(self, most: float) -> List[int]:
        """The best split over the devices of the one with the fewest empty parts."""
        ends = self._cheapest(0.0, most, np.zeros(len(self.ends)))
        used = [device for device, blocks in enumerate(np.diff([0, *ends])) if blocks]
        weights, limits = ([values[i] for i in used] for values in (self.weights, self.limits))
        found = Partition(self.sizes, weights, limits, self.costs)._most_even(most)
        place = 0
        for device in range(len(ends)):
            if device in used:
                place = found[used.index(device)]
            ends[device] = place
        return ends

    def _most_even(self, most: float) -> List[int]:
        """The split with the least imbalance within a bound, and of these the cheapest."""
        # A least load above this does not reduce the imbalance: the largest load decides it.
        least = max(_ENOUGH * self.ideal, 2 * self.ideal - most)
        if not self._possible(least, most):
            least = self._bisect(0.0, least, lambda bound: self._possible(bound, most))
        return self._cheapest(least, most, [*self.costs, 0.0])

    def _bisect(self, good: float, bad: float, test: Callable[[float], bool]) -> float:
        """The bound nearest to ``bad`` that passes a test which ``good`` passes."""
        while abs(good - bad) > _TOLERANCE * self.ideal:
            middle = (good + bad) / 2
            if middle in (good, bad):
                break  # far above the ideal, floats are further apart than the tolerance
            if test(middle):
                good = middle
            else:
                bad = middle
        return good
