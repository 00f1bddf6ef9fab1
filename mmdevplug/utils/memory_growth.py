"""Notice memory that grows for as long as a run lasts, and say what it consists of."""

import gc
from collections import Counter, deque
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

MB = 2**20
#: A span of time is seen as this many windows, of each of which the least value counts.
WINDOWS = 4
WINDOW_SAMPLES = 4
#: The part of the mean rise from window to window that each single rise has to reach.
STEADY = 0.7
#: The largest number of types that a report names.
MOST_NAMED = 6
WITH_GRAPH = ' with its graph'

_CONTAINERS = (list, dict, set, tuple, deque)
#: Objects that hold much and that the garbage collector does not know.
_LEAVES = frozenset((np.ndarray, bytes, bytearray))
#: How many objects are asked at once for what they hold.
CHUNK = 10_000


class Growth(NamedTuple):
    """A rise of memory.

    Attributes:
        start (int): The first iteration of the span.
        end (int): The last.
        bytes (int): How much more is in use at its end than at its start.
    """

    start: int
    end: int
    bytes: int

    @property
    def rate(self) -> float:
        """Bytes an iteration."""
        return self.bytes / max(1, self.end - self.start)


class _Span:
    """The samples of a span of time.

    Args:
        whole (bool): Whether it is everything since the first sample, which finds a slow leak,
            instead of the last samples, which find one that begins late.
    """

    def __init__(self, whole: bool) -> None:
        self._whole = whole
        self._samples: List[Tuple[int, int]] = []
        self._pending: List[Tuple[int, int]] = []
        self._spacing = 1
        self._highest_before = 0

    def add(self, iteration: int, value: int) -> Optional[Growth]:
        """Take a sample; return the steady growth of a full span."""
        self._pending.append((iteration, value))
        if len(self._pending) < self._spacing:
            return None
        self._samples.append(_lowest(self._pending))
        self._pending = []
        if len(self._samples) < WINDOWS * WINDOW_SAMPLES:
            return None
        growth = self._steady_growth()
        self._make_room()
        return growth

    def _steady_growth(self) -> Optional[Growth]:
        values = [value for _, value in self._samples]
        firsts = range(0, len(values), WINDOW_SAMPLES)
        lows = [min(values[first : first + WINDOW_SAMPLES]) for first in firsts]
        steps = [later - earlier for earlier, later in zip(lows, lows[1:])]
        rise = lows[-1] - lows[0]
        steady = min(steps) >= STEADY * rise / len(steps)
        highest = max(self._highest_before, *values[:WINDOW_SAMPLES])
        if rise <= 0 or not steady or lows[-1] <= highest:
            return None
        # The lowest points of the first window and the last are not as far apart as the samples.
        return Growth(self._samples[0][0], self._samples[-1][0], rise * WINDOWS // len(steps))

    def _make_room(self) -> None:
        if self._whole:
            pairs = zip(self._samples[::2], self._samples[1::2])
            self._samples = [_lowest(pair) for pair in pairs]
            self._spacing *= 2
            return
        dropped, self._samples = self._samples[:WINDOW_SAMPLES], self._samples[WINDOW_SAMPLES:]
        self._highest_before = max(self._highest_before, *(value for _, value in dropped))


def _lowest(samples: Sequence[Tuple[int, int]]) -> Tuple[int, int]:
    return min(samples, key=lambda sample: sample[1])


class GrowthDetector:
    """Tells steady growth from jumps, from noise and from caches that settle.

    A span of time is cut into windows. It counts as growth if the least value of each window is
    above that of the window before, by amounts that are not far from each other, and if the least
    value of the last window is above everything before: one jump leaves windows that do not rise.
    A cache rises less and less, so what rises more slowly than it did at first is no growth.

    Args:
        least (int): Bytes by which memory has to rise in a span.
    """

    def __init__(self, least: int) -> None:
        self.least = least
        self._spans = [_Span(whole=True), _Span(whole=False)]
        self._first: Optional[Tuple[int, int]] = None
        self._reported = 0

    def add(self, iteration: int, value: int) -> Optional[Growth]:
        """Take a sample.

        Args:
            iteration (int): When it was taken.
            value (int): Bytes in use.

        Returns:
            Growth or None: What is to be reported: growth for the first time, and again whenever
            the memory gained since the first sample has doubled.
        """
        if self._first is None:
            self._first = (iteration, value)
        found = [span.add(iteration, value) for span in self._spans]
        gained = value - self._first[1]
        overall = gained / max(1, iteration - self._first[0])
        grown = [
            growth
            for growth in found
            if growth is not None and growth.bytes >= self.least and growth.rate > STEADY * overall
        ]
        if not grown or gained < 2 * self._reported:
            return None
        self._reported = gained
        return grown[0]


class Snapshot:
    """How many objects of each kind there are, and what they hold. Costly.

    Tensors are told apart by shape and dtype, also those on a lazy device, which runs nothing for
    it; NumPy arrays likewise. Of other objects, containers and byte strings have a size.

    Args:
        lazy_type (str, optional): The type of devices whose tensors have no address to compare.
            Defaults to None.

    Attributes:
        counts (Counter): Kind to number of objects.
        bytes (Counter): Kind to bytes; tensors at the same address are counted once.
    """

    def __init__(self, lazy_type: Optional[str] = None) -> None:
        self._lazy_type = lazy_type
        self.counts: Dict[str, int] = Counter()
        self.bytes: Dict[str, int] = Counter()
        self._seen: Set[int] = set()
        gc.collect()
        objects = gc.get_objects()
        kinds = Counter(map(type, objects))
        # Not isinstance, which asks proxies for what they stand for.
        sized = {kind for kind in kinds if issubclass(kind, (Tensor, np.ndarray))}
        for kind, number in kinds.items():
            if kind not in sized:
                self.counts[kind.__name__] += number
        for kind in _CONTAINERS:
            found = [thing for thing in objects if type(thing) is kind]
            self.bytes[kind.__name__] += sum(map(kind.__sizeof__, found))
        for thing in objects:
            if type(thing) in sized:
                self._add(thing)
        for first in range(0, len(objects), CHUNK):
            held = gc.get_referents(*objects[first : first + CHUNK])
            self._add_leaves([thing for thing in held if type(thing) in _LEAVES])
        self._seen = set()

    def _add_leaves(self, leaves: Sequence[Any]) -> None:
        for thing in leaves:
            if id(thing) not in self._seen:
                self._seen.add(id(thing))
                self._add(thing)

    def _add(self, thing: Any) -> None:
        kind = type(thing)
        if issubclass(kind, Tensor) and is_lazy(thing):
            name, size = f'{kind.__name__} without a shape yet', 0
        elif issubclass(kind, Tensor):
            name, size = describe_tensor(thing), self._new_bytes(thing)
        elif issubclass(kind, np.ndarray):
            name = f'{kind.__name__} {thing.shape} {thing.dtype}'
            size = thing.nbytes if thing.base is None else 0
        else:
            name, size = kind.__name__, len(thing)
        self.counts[name] += 1
        self.bytes[name] += size

    def _new_bytes(self, tensor: Tensor) -> int:
        size = tensor_bytes(tensor)
        if size == 0 or tensor.device.type == self._lazy_type:
            return size
        try:
            address = tensor.data_ptr()
        except RuntimeError:  # a wrapper, or a tensor without storage
            return size
        if address and address in self._seen:
            return 0
        self._seen.add(address)
        return size

    def growth_since(self, earlier: 'Snapshot') -> List[str]:
        """Name the kinds that have grown, those with most bytes first.

        Args:
            earlier (Snapshot): Taken before.

        Returns:
            List[str]: For example ``'Tensor (64, 128) float32: +400 objects, +12.5 MB'``.
        """
        grown = []
        for name, count in self.counts.items():
            more, larger = count - earlier.counts[name], self.bytes[name] - earlier.bytes[name]
            tenths = round(10 * larger / MB)
            if more > 2 or tenths > 0:
                # A graph holds more than its last tensor shows.
                grown.append((tenths, name.endswith(WITH_GRAPH), more, name))
        return [
            f'{name}: {more:+} objects' + (f', {tenths / 10:+.1f} MB' if tenths else '')
            for tenths, _, more, name in sorted(grown, reverse=True)[:MOST_NAMED]
        ]


def describe_tensor(tensor: Tensor) -> str:
    """Kind, shape and dtype, and whether the tensor keeps the graph that it was computed by."""
    graph = WITH_GRAPH if tensor.grad_fn is not None else ''
    dtype = str(tensor.dtype).replace('torch.', '')
    return f'{type(tensor).__name__} {tuple(tensor.shape)} {dtype}{graph}'


def tensor_bytes(tensor: Tensor) -> int:
    """The size of a tensor's elements, without running anything."""
    if tensor.layout is not torch.strided:
        return 0
    return tensor.numel() * tensor.element_size()
