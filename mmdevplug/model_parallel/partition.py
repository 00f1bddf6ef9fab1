"""Find the best split of a sequence into contiguous parts, one for each device.

First the largest load relative to its device is made as small as any split can make it, by
bisection with an exact check; then, among the splits that reach it, the imbalance; then the cost
of the cuts. It is the linear partition problem (Skiena, The Algorithm Design Manual, 8.5) with
unequal bins. Filling device after device decides most checks; where it does not, because no device
may stay empty, all places at which a part may end are followed.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from dataclasses import dataclass
from itertools import accumulate
from typing import Deque, Dict, List, Optional, Sequence, Tuple

import numpy as np

#: The least cost for each place that a part may end at.
Costs = Dict[int, float]

_HALVINGS = 60
#: Relative; a byte of ten terabytes.
_PRECISION = 1e-13
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Bounds:
    """What the part of each device may weigh, both ends included."""

    lower: List[float]
    upper: List[float]


class Partition:
    """Splits a sequence of sizes.

    Args:
        sizes (Sequence[int]): Bytes, in order.
        weights (Sequence[float]): What each device holds in proportion; above 0.
        limits (Sequence[float], optional): The most each may hold. Defaults to no limit.
        cut_costs (Sequence[float], optional): Of a cut before each place. Defaults to 0.
        allow_empty (bool): Whether a device may stay without anything. Defaults to False.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[float],
        limits: Optional[Sequence[float]] = None,
        cut_costs: Optional[Sequence[float]] = None,
        allow_empty: bool = False,
    ) -> None:
        self.ends = [0, *accumulate(int(size) for size in sizes)]
        self.weights = [float(weight) for weight in weights]
        self.limits = [float('inf')] * len(weights) if limits is None else list(limits)
        self.costs = [*(cut_costs or [0.0] * len(sizes)), 0.0]
        self.allow_empty = allow_empty
        self._ends = np.asarray(self.ends, dtype=np.float64)

    def best(self) -> Optional[List[int]]:
        """Find the split.

        Returns:
            List[int], optional: The end of each part, e.g. ``[3, 5]`` for ``[0:3]`` and
            ``[3:5]``; None if no split keeps the limits.
        """
        bottleneck = self._least_bottleneck()
        if bottleneck is None:
            return None
        if not self.allow_empty:
            return self._cheapest(self._most_even(bottleneck))
        return self._best_of_used(self._used(self._bounds(bottleneck)))

    def loads(self, ends: Sequence[int]) -> List[int]:
        """What the parts weigh."""
        marks = [0, *ends]
        return [self.ends[b] - self.ends[a] for a, b in zip(marks, marks[1:])]

    def _bounds(self, bottleneck: float, least: float = 0.0) -> Bounds:
        return Bounds(
            [least * w * (1 - _PRECISION) - _ROUNDING for w in self.weights],
            [
                min(limit, bottleneck * w * (1 + _PRECISION)) + _ROUNDING
                for limit, w in zip(self.limits, self.weights)
            ],
        )

    # the largest load ------------------------------------------------------------------------

    def _least_bottleneck(self) -> Optional[float]:
        total = self.ends[-1]
        ends = self._some_split(self._bounds(total / min(self.weights)))
        if ends is None:
            return None
        high = self._bottleneck_of(ends)
        low = total / sum(self.weights) * (1 - _PRECISION)
        for _ in range(_HALVINGS):
            if high - low <= _PRECISION * high:
                break
            middle = (low + high) / 2
            ends = self._some_split(self._bounds(middle))
            if ends is None:
                low = middle
            else:
                high = min(high, self._bottleneck_of(ends))
        return high

    def _bottleneck_of(self, ends: Sequence[int]) -> float:
        return max(load / weight for load, weight in zip(self.loads(ends), self.weights))

    def _some_split(self, bounds: Bounds) -> Optional[List[int]]:
        """Any split within the upper bounds."""
        ends = self._fill(bounds, self.allow_empty)
        if ends is not None or self.allow_empty:
            return ends
        if self._fill(bounds, empty=True) is None:
            return None  # not even with empty devices
        return self._follow(bounds)

    def _fill(self, bounds: Bounds, empty: bool) -> Optional[List[int]]:
        """Give each device as much as it may hold, and leave one block for each after it."""
        count, end, ends = len(self.ends) - 1, 0, []
        for device, upper in enumerate(bounds.upper):
            start = end
            end = max(start, bisect_right(self.ends, self.ends[start] + upper) - 1)
            if not empty:
                end = min(end, count - (len(bounds.upper) - device - 1))
                if end <= start:
                    return None
            ends.append(end)
        return ends if end == count else None

    # devices that stay empty ------------------------------------------------------------------

    def _used(self, bounds: Bounds) -> List[int]:
        """The devices of a split within bounds that leaves as few empty as possible."""
        count = len(self.ends) - 1
        costs: Costs = {0: 0.0}
        chosen = []
        for lower, upper in zip(bounds.lower, bounds.upper):
            after, start = self._extend(costs, lower, upper)
            for end, cost in costs.items():
                if cost + 1 < after.get(end, np.inf):
                    after[end], start[end] = cost + 1, end
            costs = after
            chosen.append(start)
        end, used = count, []
        for device in reversed(range(len(chosen))):
            if chosen[device][end] != end:
                used.append(device)
            end = chosen[device][end]
        return used[::-1]

    def _best_of_used(self, used: Sequence[int]) -> Optional[List[int]]:
        part = Partition(
            np.diff(self.ends),
            [self.weights[device] for device in used],
            [self.limits[device] for device in used],
            self.costs[:-1],
        )
        found = dict(zip(used, part.best() or []))
        ends = [0]
        for device in range(len(self.weights)):
            ends.append(found.get(device, ends[-1]))
        return ends[1:]

    # every place a part may end at ------------------------------------------------------------

    def _follow(self, bounds: Bounds) -> Optional[List[int]]:
        """Any split within both bounds, by all the places that parts may end at."""
        places = [np.zeros(1, dtype=np.int64)]
        for lower, upper in zip(bounds.lower, bounds.upper):
            now = self._reached(places[-1], lower, upper)
            if not len(now):
                return None
            places.append(now)
        count = len(self.ends) - 1
        return self._trace_back(places, bounds) if places[-1][-1] == count else None

    def _reached(self, starts: np.ndarray, lower: float, upper: float) -> np.ndarray:
        """The ends, in order, of parts that begin at one of ``starts`` (in order)."""
        first = bisect_left(self.ends, self.ends[starts[0]] + lower)
        last = bisect_right(self.ends, self.ends[starts[-1]] + upper)
        ends = np.arange(max(first, int(starts[0]) + 1), last)
        at = self._ends[starts]
        # The starts of each end make a window of ``starts``.
        low = np.searchsorted(at, self._ends[ends] - upper, side='left')
        high = np.searchsorted(at, self._ends[ends] - lower, side='right')
        high = np.minimum(high, np.searchsorted(starts, ends, side='left'))
        return ends[high > low]

    def _trace_back(self, places: List[np.ndarray], bounds: Bounds) -> List[int]:
        end = len(self.ends) - 1
        ends = [end]
        for device in range(len(self.weights) - 1, 0, -1):
            low, high = self._window(end, bounds, device)
            known = places[device]
            end = int(known[(known >= low) & (known < high)][-1])
            ends.append(end)
        return ends[::-1]

    def _window(self, end: int, bounds: Bounds, device: int) -> Tuple[int, int]:
        """The first start of a part that ends there, and one more than the last."""
        low = bisect_left(self.ends, self.ends[end] - bounds.upper[device])
        high = bisect_right(self.ends, self.ends[end] - bounds.lower[device])
        return low, min(high, end)

    # imbalance and cuts -----------------------------------------------------------------------

    def _most_even(self, bottleneck: float) -> Bounds:
        """Raise the least load until it no longer decides the imbalance, or cannot rise."""
        ideal = self.ends[-1] / sum(self.weights)
        enough = max(0.0, 2 * ideal - bottleneck)
        if self._follow(self._bounds(bottleneck, enough)) is not None:
            return self._bounds(bottleneck, enough)
        low, high = 0.0, enough
        for _ in range(_HALVINGS):
            if high - low <= _PRECISION * ideal:
                break
            middle = (low + high) / 2
            ends = self._follow(self._bounds(bottleneck, middle))
            if ends is None:
                high = middle
                continue
            low = max(low, min(load / w for load, w in zip(self.loads(ends), self.weights)))
        return self._bounds(bottleneck, low)

    def _cheapest(self, bounds: Bounds) -> List[int]:
        """Of the splits within bounds, the one whose cuts cost least."""
        count = len(self.ends) - 1
        costs: Costs = {0: 0.0}
        chosen = []
        for lower, upper in zip(bounds.lower, bounds.upper):
            costs, start = self._extend(costs, lower, upper)
            costs = {end: cost + self.costs[end] for end, cost in costs.items()}
            chosen.append(start)
        end, ends = count, [count]
        for start in reversed(chosen[1:]):
            end = start[end]
            ends.append(end)
        return ends[::-1]

    def _extend(self, costs: Costs, lower: float, upper: float) -> Tuple[Costs, Dict[int, int]]:
        """One more part: for each end the least cost so far, and where the part starts."""
        after: Costs = {}
        start: Dict[int, int] = {}
        starts = sorted(costs)
        window: Deque[int] = deque()
        following = 0
        for end in range(starts[0], bisect_right(self.ends, self.ends[starts[-1]] + upper)):
            while following < len(starts) and starts[following] < end:
                begin = starts[following]
                if self.ends[end] - self.ends[begin] < lower:
                    break
                while window and costs[window[-1]] >= costs[begin]:
                    window.pop()
                window.append(begin)
                following += 1
            while window and self.ends[end] - self.ends[window[0]] > upper:
                window.popleft()
            if window:
                start[end], after[end] = window[0], costs[window[0]]
        return after, start
