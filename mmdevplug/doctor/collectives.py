"""Run the collectives that training needs with values that are known beforehand.

Rank r of N puts in ``(r + 1) * pattern``, where the pattern repeats 1 to 7. All values are whole
numbers that float32 holds exactly, so results are compared without a tolerance; averages alone
are rounded.
"""

import re
from typing import Callable, Dict, Iterator, List, NamedTuple, Tuple

import torch
from torch import Tensor, distributed as torch_dist, nn

from mmdevplug.distributed.process_group import DeviceContext
from mmdevplug.gradients import DeviceDistributedDataParallel

#: Averages are divided by the number of ranks.
AVERAGING_TOLERANCE = 1e-6

#: What a backend says that lacks a collective, on all ranks and before anything is sent.
_LACKING = re.compile(r'does not (support|implement)|not (yet )?(supported|implemented)', re.I)


class Peers(NamedTuple):
    """A process group, and where its tensors have to be.

    Attributes:
        context (DeviceContext): Where this process computes.
        rank (int): Of this process.
        size (int): Number of ranks.
        device (torch.device): Where the backend takes tensors from.
    """

    context: DeviceContext
    rank: int
    size: int
    device: torch.device

    @property
    def total(self) -> int:
        """The sum of ``r + 1`` over all ranks."""
        return self.size * (self.size + 1) // 2

    def pattern(self, count: int) -> Tensor:
        return (torch.arange(count, device='cpu') % 7 + 1).float()

    def mine(self, count: int) -> Tensor:
        return ((self.rank + 1) * self.pattern(count)).to(self.device)

    def empty(self, count: int) -> Tensor:
        return torch.zeros(count, device=self.device)


class Case(NamedTuple):
    """A collective with tensors of one size.

    Attributes:
        reset (Callable): Puts the inputs back; not timed.
        run (Callable): Communicates.
        results (Callable): What came out, and the host tensors that it should be.
        device (torch.device): Where it should have come out.
        tolerance (float): Of the largest expected value.
    """

    reset: Callable[[], None]
    run: Callable[[], None]
    results: Callable[[], List[Tuple[Tensor, Tensor]]]
    device: torch.device
    tolerance: float = 0.0


def _nothing() -> None:
    pass


def _all_reduce(peers: Peers, count: int) -> Case:
    tensor, mine = peers.empty(count), peers.mine(count)
    return Case(
        lambda: _copy(tensor, mine),
        lambda: torch_dist.all_reduce(tensor),
        lambda: [(tensor, peers.total * peers.pattern(count))],
        peers.device,
    )


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source)


def _broadcast(peers: Peers, count: int) -> Case:
    tensor, mine = peers.empty(count), peers.mine(count)
    source = peers.size - 1
    return Case(
        lambda: _copy(tensor, mine),
        lambda: torch_dist.broadcast(tensor, source),
        lambda: [(tensor, peers.size * peers.pattern(count))],
        peers.device,
    )


def _all_gather(peers: Peers, count: int) -> Case:
    gathered, mine = [peers.empty(count) for _ in range(peers.size)], peers.mine(count)
    return Case(
        _nothing,
        lambda: torch_dist.all_gather(gathered, mine),
        lambda: _of_each_rank(gathered, peers.pattern(count)),
        peers.device,
    )


def _of_each_rank(tensors: List[Tensor], pattern: Tensor) -> List[Tuple[Tensor, Tensor]]:
    return [(tensor, (rank + 1) * pattern) for rank, tensor in enumerate(tensors)]


# our own ----------------------------------------------------------------------------------------


class _Weighted(nn.Module):
    """One parameter, whose gradient is the input."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(count, device='cpu'))

    def forward(self, factors: Tensor) -> Tensor:
        return (self.weight * factors).sum()


def _gradient_averaging(peers: Peers, count: int) -> Case:
    """A backward of the model wrapper, as in training; staged on the host where it has to be."""
    device = peers.context.device
    wrapper = DeviceDistributedDataParallel(_Weighted(count))
    factors = ((peers.rank + 1) * peers.pattern(count)).to(device)
    weight = wrapper.module.weight

    def reset() -> None:
        weight.grad = None

    return Case(
        reset,
        lambda: wrapper(factors).backward(),
        lambda: [(weight.grad, peers.total / peers.size * peers.pattern(count))],
        device,
        AVERAGING_TOLERANCE,
    )


#: What is timed with messages of several sizes.
SIZED: Dict[str, Callable[[Peers, int], Case]] = {
    'all_reduce': _all_reduce,
    'broadcast': _broadcast,
    'all_gather': _all_gather,
    'gradient averaging': _gradient_averaging,
}


def is_lacking(error: Exception) -> bool:
    """Whether a backend says that it has no such collective."""
    if isinstance(error, AttributeError):
        return "module 'torch.distributed' has no attribute" in str(error)
    return isinstance(error, RuntimeError) and _LACKING.search(str(error)) is not None


def problems(case: Case, peers: Peers) -> Iterator[str]:
    """What is wrong with the results of a case: values and devices."""
    for number, (found, expected) in enumerate(case.results()):
        which = f'tensor {number} of rank {peers.rank}'
        if found.device != case.device:
            yield f'{which} is on {found.device}, expected {case.device}'
        (on_host,) = peers.context.accelerator.to_host([found]) if _remote(found) else (found,)
        if on_host.shape != expected.shape:
            yield f'{which} has shape {tuple(on_host.shape)}, expected {tuple(expected.shape)}'
            continue
        difference = (on_host.detach() - expected).abs()
        # Written so that NaN fails as well.
        wrong = ~(difference <= case.tolerance * expected.abs().max())
        if wrong.any():
            at = int(wrong.nonzero()[0])
            yield (
                f'{which} holds {on_host[at].item():g} at {at}, expected {expected[at].item():g}'
            )


def _remote(tensor: Tensor) -> bool:
    return tensor.device.type != 'cpu'
