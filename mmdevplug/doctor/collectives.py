"""Every collective with values that are known beforehand.

Rank r of N puts in ``(r + 1) * pattern``, where the pattern repeats 1 to 7. All values are whole
numbers that float32 holds exactly, so results are compared without a tolerance; averages alone
are rounded.
"""

import re
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Tuple

import torch
from torch import Tensor, distributed as torch_dist, nn

from mmdevplug.distributed.coalesced import broadcast_tensors
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


def _all_reduce(operation: str) -> Callable[[Peers, int], Case]:
    def make(peers: Peers, count: int) -> Case:
        tensor, mine, pattern = peers.empty(count), peers.mine(count), peers.pattern(count)
        factor = peers.total if operation == 'SUM' else peers.size
        reduction = getattr(torch_dist.ReduceOp, operation)
        return Case(
            lambda: _copy(tensor, mine),
            lambda: torch_dist.all_reduce(tensor, op=reduction),
            lambda: [(tensor, factor * pattern)],
            peers.device,
        )

    return make


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


def _gather(peers: Peers, count: int) -> Case:
    gathered = [peers.empty(count) for _ in range(peers.size)] if peers.rank == 0 else None
    mine = peers.mine(count)
    return Case(
        _nothing,
        lambda: torch_dist.gather(mine, gathered, dst=0),
        lambda: _of_each_rank(gathered or [], peers.pattern(count)),
        peers.device,
    )


def _scatter(peers: Peers, count: int) -> Case:
    tensor, pattern = peers.empty(count), peers.pattern(count)
    parts = None
    if peers.rank == 0:
        parts = [((rank + 1) * pattern).to(peers.device) for rank in range(peers.size)]
    return Case(
        _nothing,
        lambda: torch_dist.scatter(tensor, parts, src=0),
        lambda: [(tensor, (peers.rank + 1) * pattern)],
        peers.device,
    )


def _reduce_scatter(peers: Peers, count: int) -> Case:
    tensor, mine = peers.empty(count), peers.mine(count)
    parts = [mine * (rank + 1) for rank in range(peers.size)]
    return Case(
        _nothing,
        lambda: torch_dist.reduce_scatter(tensor, parts),
        lambda: [(tensor, (peers.rank + 1) * peers.total * peers.pattern(count))],
        peers.device,
    )


def _all_to_all(peers: Peers, count: int) -> Case:
    part = max(1, count // peers.size)
    sent, received = peers.mine(part).repeat(peers.size), peers.empty(part * peers.size)
    expected = torch.cat([(rank + 1) * peers.pattern(part) for rank in range(peers.size)])
    return Case(
        _nothing,
        lambda: torch_dist.all_to_all_single(received, sent),
        lambda: [(received, expected)],
        peers.device,
    )


def _send_and_receive(peers: Peers, count: int) -> Case:
    """Round the ring: to the next rank, from the one before."""
    mine, received = peers.mine(count), peers.empty(count)
    before, behind = (peers.rank - 1) % peers.size, (peers.rank + 1) % peers.size

    def run() -> None:
        if peers.size == 1:
            received.copy_(mine)  # a rank sends nothing to itself
            return
        operations = [
            torch_dist.P2POp(torch_dist.isend, mine, behind),
            torch_dist.P2POp(torch_dist.irecv, received, before),
        ]
        for request in torch_dist.batch_isend_irecv(operations):
            request.wait()

    return Case(
        _nothing, run, lambda: [(received, (before + 1) * peers.pattern(count))], peers.device
    )


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


def _gather_to_devices(peers: Peers, count: int) -> Case:
    """Tensors of all devices on this rank's own device, through the host where it has to be."""
    accelerator, device = peers.context.accelerator, peers.context.device
    mine = peers.mine(count).to(device)
    gathered = [torch.zeros(count, device='cpu').to(device) for _ in range(peers.size)]

    def run() -> None:
        if peers.device == device:
            torch_dist.all_gather(gathered, mine)
            return
        (sent,) = accelerator.to_host([mine])
        received = [torch.empty_like(sent) for _ in range(peers.size)]
        torch_dist.all_gather(received, sent)
        accelerator.copy_to_device(received, gathered)

    return Case(_nothing, run, lambda: _of_each_rank(gathered, peers.pattern(count)), device)


def _broadcast_to_devices(peers: Peers, count: int) -> Case:
    accelerator, device = peers.context.accelerator, peers.context.device
    tensor, mine = torch.zeros(count, device='cpu').to(device), peers.mine(count).to(device)
    return Case(
        lambda: _copy(tensor, mine),
        lambda: broadcast_tensors([tensor], accelerator, src=peers.size - 1),
        lambda: [(tensor, peers.size * peers.pattern(count))],
        device,
    )


#: What is timed with messages of several sizes.
SIZED: Dict[str, Callable[[Peers, int], Case]] = {
    'all_reduce sum': _all_reduce('SUM'),
    'all_reduce max': _all_reduce('MAX'),
    'broadcast': _broadcast,
    'all_gather': _all_gather,
    'gather': _gather,
    'scatter': _scatter,
    'reduce_scatter': _reduce_scatter,
    'all_to_all': _all_to_all,
    'send and receive': _send_and_receive,
    'gradient averaging': _gradient_averaging,
    'gather to devices': _gather_to_devices,
    'broadcast to devices': _broadcast_to_devices,
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


def object_problem(peers: Peers) -> str:
    """Gather objects, which PyTorch pickles; to be asked among processes of one host alone."""
    gathered: List[Any] = [None] * peers.size
    torch_dist.all_gather_object(gathered, dict(rank=peers.rank, name=f'rank {peers.rank}'))
    expected = [dict(rank=rank, name=f'rank {rank}') for rank in range(peers.size)]
    return '' if gathered == expected else f'rank {peers.rank} got {gathered}'
