"""Detect memory that keeps growing, and count the objects that fill it."""

import gc
import sys
from collections import Counter, deque
from typing import Any, Dict, List, Optional, Set, Tuple

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


class GrowthDetector:
    """Detect steady growth; jumps, noise and caches that fill up are none.

    Args:
        least (int): Smallest growth to report, in bytes.
    """

    def __init__(self, least: int) -> None:
        self._least = least
        self._samples: List[Tuple[int, int]] = []
        self._reported = 0

    def add(self, iteration: int, value: int) -> Optional[str]:
        """Add a sample of bytes in use; return how they grew, again when that has doubled."""
        self._samples.append((iteration, value))
        count = len(self._samples)
        if count >= LATEST and count & (count - 1) == 0:
            span = self._samples  # after 16, 32, 64, ... samples all of them, for slow growth
        elif count > LATEST and count % (LATEST // WINDOWS) == 0:
            span = self._samples[-LATEST:]
        else:
            return None
        (first, first_value), start = self._samples[0], span[0][0]
        gained, grown = value - first_value, self._steady_growth([used for _, used in span])
        rate = grown / (iteration - start)
        # A cache that fills up grows more and more slowly.
        slower = rate <= STEADY * gained / (iteration - first)
        if grown < self._least or slower or gained < 2 * self._reported:
            return None
        self._reported = gained
        return (
            f'rose by {grown / MB:.1f} MB from iteration {start} to {iteration} '
            f'({rate / 1024:.1f} kB an iteration)'
        )

    def _steady_growth(self, values: List[int]) -> int:
        """Bytes by which memory rose, -1 unless each window is above the one before."""
        window = len(values) // WINDOWS
        lows = [min(values[start : start + window]) for start in range(0, len(values), window)]
        steps = [later - earlier for earlier, later in zip(lows, lows[1:])]
        rise = lows[-1] - lows[0]
        earlier = self._samples[: window - len(values)]
        steady = min(steps) >= STEADY * rise / len(steps) and rise > 0
        if not steady or lows[-1] <= max(used for _, used in earlier):
            return -1
        # From the first window to the last is one window less than the whole span.
        return rise * WINDOWS // len(steps)


class ObjectCounts:
    """Count the objects of each kind and their bytes; takes up to seconds.

    Tensors and NumPy arrays are distinguished by shape and dtype. Nothing runs on a lazy device.
    """

    def __init__(self) -> None:
        self.counts: Dict[str, int] = Counter()
        self.bytes: Dict[str, int] = Counter()
        self._seen: Set[int] = set()
        gc.collect()
        for thing in gc.get_objects():
            self._add(thing)
            for held in gc.get_referents(thing):
                # The garbage collector does not list these itself.
                if type(held) in (np.ndarray, bytes, bytearray) and id(held) not in self._seen:
                    self._seen.add(id(held))
                    self._add(held)

    def _add(self, thing: Any) -> None:
        kind = type(thing)  # isinstance would ask proxies for what they stand for
        name, size = kind.__name__, 0
        if issubclass(kind, Tensor) and is_lazy(thing):
            name += ' without a shape yet'
        elif issubclass(kind, Tensor):
            name, size = describe_tensor(thing), self._new_bytes(thing)
        elif issubclass(kind, np.ndarray):
            name += f' {thing.shape} {thing.dtype}'
            size = thing.nbytes if thing.base is None else 0
        elif kind in (list, dict, set, tuple, deque, bytes, bytearray):
            size = sys.getsizeof(thing)
        self.counts[name] += 1
        self.bytes[name] += size

    def _new_bytes(self, tensor: Tensor) -> int:
        try:
            address = tensor.data_ptr()  # 0 on lazy devices
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
