"""Detect memory that keeps growing, and count the objects that fill it."""

import gc
import sys
from collections import Counter, deque
from typing import Any, Deque, Dict, List, Optional, Set, Tuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

MB = 2**20
#: Samples are split into this many windows; only the lowest value of each counts.
WINDOWS = 4
#: Number of the latest samples that show growth which began late.
LATEST = 16
#: Each rise from window to window has to reach this part of their mean.
STEADY = 0.7
WITH_GRAPH = ' with its graph'
#: Objects that the garbage collector does not list.
UNLISTED = frozenset((np.ndarray, bytes, bytearray))
#: Objects whose contents are listed at a time.
CHUNK = 10_000


class GrowthDetector:
    """Detect steady growth by ``least`` bytes; jumps, noise and caches that fill up are none."""

    def __init__(self, least: float) -> None:
        self._least = least
        self._count = self._reported = 0
        self._latest: Deque[Tuple[int, int]] = deque(maxlen=LATEST)
        #: The highest value before the latest.
        self._highest = 0
        #: All samples: the first iteration and the lowest value of each `_spacing` of them.
        self._all: List[Tuple[int, int]] = []
        self._spacing = 1

    def add(self, iteration: int, value: int) -> Optional[str]:
        """Add a sample of bytes in use; return how they grew, again when that has doubled."""
        if self._count == 0:
            self._first, self._first_value = iteration, value
        elif self._count >= LATEST:
            self._highest = max(self._highest, self._latest[0][1])
        if self._count % self._spacing == 0:
            self._all.append((iteration, value))
        self._all[-1] = self._all[-1][0], min(self._all[-1][1], value)
        self._latest.append((iteration, value))
        self._count += 1
        if self._count == LATEST * self._spacing:
            # After 16, 32, 64, ... samples, for slow growth.
            span, highest = self._all, 0
            self._all = [(a[0], min(a[1], b[1])) for a, b in zip(span[::2], span[1::2])]
            self._spacing *= 2
        elif self._count > LATEST and self._count % (LATEST // WINDOWS) == 0:
            span, highest = list(self._latest), self._highest
        else:
            return None
        start, gained = span[0][0], value - self._first_value
        grown = _steady_growth([used for _, used in span], highest)
        rate = grown / (iteration - start)
        # A cache that fills up grows more and more slowly.
        slower = rate <= STEADY * gained / (iteration - self._first)
        if grown < self._least or slower or gained < 2 * self._reported:
            return None
        self._reported = gained
        return (
            f'rose by {grown / MB:.1f} MB from iteration {start} to {iteration} '
            f'({rate / 1024:.1f} kB an iteration)'
        )


def _steady_growth(values: List[int], highest: int) -> int:
    """Bytes by which memory rose, -1 unless it did so in each window and above ``highest``."""
    window = len(values) // WINDOWS
    lows = [min(values[start : start + window]) for start in range(0, len(values), window)]
    steps = [later - earlier for earlier, later in zip(lows, lows[1:])]
    rise = lows[-1] - lows[0]
    steady = min(steps) >= STEADY * rise / len(steps) and rise > 0
    if not steady or lows[-1] <= max(highest, *values[:window]):
        return -1
    # From the first window to the last is one window less than the whole span.
    return rise * WINDOWS // len(steps)


class ObjectCounts:
    """Count the objects of each kind and their bytes; takes up to seconds.

    Tensors and NumPy arrays are distinguished by shape and dtype. Nothing runs on a lazy device;
    tensors of devices of ``lazy_type`` have no address to compare.
    """

    def __init__(self, lazy_type: Optional[str] = None) -> None:
        self._lazy_type = lazy_type
        self.counts: Dict[str, int] = Counter()
        self.bytes: Dict[str, int] = Counter()
        self._seen: Set[int] = set()
        gc.unfreeze()  # what grows may be held by a module
        gc.collect()
        objects = gc.get_objects()
        kinds = Counter(map(type, objects))
        # isinstance would ask proxies for what they stand for.
        shaped = {kind for kind in kinds if issubclass(kind, (Tensor, np.ndarray))}
        for kind in kinds.keys() - shaped:
            self.counts[kind.__name__] += kinds[kind]
        for kind in (list, dict, set, tuple, deque):
            found = [thing for thing in objects if type(thing) is kind]
            self.bytes[kind.__name__] += sum(map(kind.__sizeof__, found))
        for thing in objects:
            if type(thing) in shaped:
                self._add(thing)
        for start in range(0, len(objects), CHUNK):
            held = gc.get_referents(*objects[start : start + CHUNK])
            for thing in [each for each in held if type(each) in UNLISTED]:
                if id(thing) not in self._seen:
                    self._seen.add(id(thing))
                    self._add(thing)
        self._seen = set()  # else it would be among the objects that grew

    def _add(self, thing: Any) -> None:
        kind = type(thing)
        name, size = kind.__name__, 0
        if issubclass(kind, Tensor) and is_lazy(thing):
            name += ' without a shape yet'
        elif issubclass(kind, Tensor):
            name, size = describe_tensor(thing), self._new_bytes(thing)
        elif issubclass(kind, np.ndarray):
            name += f' {thing.shape} {thing.dtype}'
            size = thing.nbytes if thing.base is None else 0
        else:
            size = sys.getsizeof(thing)
        self.counts[name] += 1
        self.bytes[name] += size

    def _new_bytes(self, tensor: Tensor) -> int:
        if tensor.device.type == self._lazy_type:
            return tensor_bytes(tensor)
        try:
            address = tensor.data_ptr()
        except RuntimeError:  # a wrapper, or a tensor without storage
            address = 0
        seen = address in self._seen
        self._seen.update([address] if address else [])
        return 0 if seen else tensor_bytes(tensor)

    def growth_since(self, earlier: 'ObjectCounts') -> List[str]:
        """Name the six kinds that grew most, as ``'Tensor (64, 128) float32: +40 objects'``."""
        grown = []
        for name, count in self.counts.items():
            more = count - earlier.counts[name]
            tenths = round(10 * (self.bytes[name] - earlier.bytes[name]) / MB)
            if more > 2 or tenths > 0:
                # A graph holds more than its last tensor shows.
                grown.append((tenths, name.endswith(WITH_GRAPH), more, name))
        return [
            f'{name}: {more:+} objects' + (f', {tenths / 10:+.1f} MB' if tenths else '')
            for tenths, _, more, name in sorted(grown, reverse=True)[:6]
        ]


def describe_tensor(tensor: Tensor) -> str:
    """Kind, shape and dtype, and whether the tensor keeps the graph that computed it."""
    graph = WITH_GRAPH if tensor.grad_fn is not None else ''
    dtype = str(tensor.dtype).replace('torch.', '')
    return f'{type(tensor).__name__} {tuple(tensor.shape)} {dtype}{graph}'


def tensor_bytes(tensor: Tensor) -> int:
    """The size of a tensor's elements, without running anything."""
    strided = tensor.layout is torch.strided
    return tensor.numel() * tensor.element_size() if strided else 0
