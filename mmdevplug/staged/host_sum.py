"""A sum that the caller's own memory holds, see :class:`.shared_sum.SharedSum`."""

from typing import Any

from torch import Tensor, distributed as torch_dist

from .host_buffers import scale, summand


class HostSum:
    """A sum or average in memory of the host, by messages of gloo.

    Attributes:
        own (Tensor): The values, flat.
        finite (bool): Whether an average has no NaN and no infinity, the same on all ranks.
    """

    def __init__(self, own: Tensor, gloo: 'torch_dist.ProcessGroupGloo', size: int) -> None:
        self.own, self.finite = own, True
        self._gloo: Any = gloo
        self._size = size
        self._average = False

    def start(self, average: bool) -> None:
        """Begin to add up what the ranks have written."""
        self._average = average
        self._summed = summand(self.own)
        self._work = self._gloo.allreduce([self._summed], torch_dist.AllreduceOptions())
        self._gloo = None  # the program may keep this sum longer than the group

    def wait(self, timeout: object = None) -> bool:
        """Wait until the sum may be read."""
        self._work.wait()
        if self._average:
            self._average, self.finite = False, scale(self._summed, 1 / self._size)
        if self._summed is not self.own:
            self.own.copy_(self._summed)
        return True

    def read(self, start: int, stop: int) -> Tensor:
        """The sum from one element to another."""
        return self.own[start:stop]

    def close(self) -> None:
        """The memory is the caller's."""
