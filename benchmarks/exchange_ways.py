"""A rank of ``exchange.py``: exchanges samples each way in turn, times it and counts its bytes."""

import json
import os
import statistics
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Tuple

import torch
from grad_ways import CARD, start_device
from hosts import INTERFACE, counter_file
from torch import Tensor, distributed as torch_dist

from mmdevplug import samples as exchanges

Samples = List[Dict[str, Any]]
LOOPBACK = '/sys/class/net/lo/statistics/tx_bytes'
FEWEST_ROUNDS, MOST_ROUNDS = 5, 25
#: Seconds of timing in a setting whose rounds are quick.
LONG_ENOUGH = 0.7


class Pool(NamedTuple):
    """The samples of all ranks; sample ``i`` is a window of the same noise that starts at ``i``.

    Attributes:
        held (list): How many samples each rank holds at first.
        shape (list): Of a sample's ``x``.
        noise (Tensor): One-dimensional, on the host.
    """

    held: List[int]
    shape: List[int]
    noise: Tensor

    def slice_of(self, rank: int, counts: List[int]) -> slice:
        """What a rank has when each has the given count, in the order of ranks."""
        return slice(sum(counts[:rank]), sum(counts[: rank + 1]))

    @property
    def rows(self) -> Tensor:
        """Each sample's ``x`` as a row; a view of the noise."""
        return self.noise.unfold(0, int(torch.Size(self.shape).numel()), 1)

    def samples(self, part: slice, device: torch.device) -> Samples:
        """Each with memory of its own, as a model would have made them."""
        return [
            dict(x=row.clone().view(self.shape).to(device), reward=index / 8)
            for index, row in enumerate(self.rows[part], part.start)
        ]

    def holds(self, found: Dict[str, Any], part: slice) -> bool:
        """Whether stacked samples are these ones, bit by bit."""
        x, rewards = found['x'].cpu(), found['reward'].cpu().double()
        indices = torch.arange(part.start, part.stop)
        expected = self.rows[part].view(torch.int32)
        return (
            x.shape == (len(indices), *self.shape)
            and torch.equal(x.flatten(1).view(torch.int32), expected)
            and torch.equal(rewards, indices / 8.0)
        )


class Exchange(NamedTuple):
    """What a way needs to know.

    Attributes:
        samples (list): Of this rank.
        part (slice): Of the pool, what this rank wants: all of it, or its share.
        shape (list): Of a sample's ``x``.
        device (torch.device): Of this rank.
    """

    samples: Samples
    part: slice
    shape: List[int]
    device: torch.device


def by_objects(job: Exchange) -> Dict[str, Tensor]:
    """What people write: pickled samples to everyone, then each tensor to the right device."""
    gathered: List[Any] = [None] * torch_dist.get_world_size()
    samples = job.samples
    if job.device.type == CARD:  # onto which PyTorch cannot unpickle
        samples = [dict(sample, x=sample['x'].cpu()) for sample in samples]
    torch_dist.all_gather_object(gathered, samples)
    mine = [sample for samples in gathered for sample in samples][job.part]
    return dict(
        x=torch.stack([sample['x'].to(job.device) for sample in mine]),
        reward=torch.tensor([sample['reward'] for sample in mine], device=job.device),
    )


def by_flat_tensors(job: Exchange) -> Dict[str, Tensor]:
    """What one writes who knows that ``x`` and ``reward`` of fixed shapes are all there is."""
    numel, mine = int(torch.Size(job.shape).numel()), len(job.samples)
    counts = torch.empty(torch_dist.get_world_size(), dtype=torch.int64)
    torch_dist.all_gather_into_tensor(counts, torch.tensor([mine]))
    held, largest = counts.tolist(), int(counts.max())
    sent = torch.empty(largest * (numel + 1))
    x, rewards = sent.split([largest * numel, largest])
    if mine:
        x[: mine * numel] = torch.stack([sample['x'] for sample in job.samples]).cpu().view(-1)
        rewards[:mine] = torch.tensor([sample['reward'] for sample in job.samples])
    received = torch.empty(len(held) * sent.numel())
    torch_dist.all_gather_into_tensor(received, sent)
    parts: List[Tuple[Tensor, Tensor]] = []
    start = 0
    for message, count in zip(received.view(len(held), -1), held):
        rows = slice(max(job.part.start - start, 0), max(min(job.part.stop - start, count), 0))
        x, rewards = message.split([largest * numel, largest])
        parts.append((x.view(largest, *job.shape)[rows], rewards[rows]))
        start += count
    return dict(
        x=torch.cat([x for x, _ in parts]).to(job.device),
        reward=torch.cat([rewards for _, rewards in parts]).to(job.device),
    )


def gather_ours(job: Exchange) -> Dict[str, Any]:
    return exchanges.gather_samples(job.samples, device=job.device, stacked=True)


def balance_ours(job: Exchange) -> Dict[str, Any]:
    return exchanges.stack_samples(
        exchanges.balance_samples(job.samples, device=job.device), job.device
    )


Way = Callable[[Exchange], Dict[str, Any]]
WAYS: Dict[str, Dict[str, Way]] = dict(
    gather=dict(object=by_objects, flat=by_flat_tensors, ours=gather_ours),
    balance=dict(object=by_objects, flat=by_flat_tensors, ours=balance_ours),
)


class Meter:
    """Times what all ranks do together, and counts what they send for it."""

    def __init__(self, context: Any) -> None:
        self.context = context
        alone = torch_dist.get_rank() == 0
        self.file = counter_file('tx') if os.path.exists(f'/sys/class/net/{INTERFACE}') else None
        if os.environ['EXCHANGE_HOSTS'] == '0':
            self.file = LOOPBACK if alone else None  # one counter for all
        self.idle = statistics.median(self.measure(lambda: None)[1] for _ in range(9))

    def measure(self, work: Callable[[], Any]) -> Tuple[float, float, Any]:
        """Do it.

        Returns:
            tuple: Seconds on this rank, bytes that its interface counted, and what came of it.
        """
        accelerator, device = self.context.accelerator, self.context.device
        accelerator.synchronize(device)
        torch_dist.barrier()
        before = self._sent()
        torch_dist.barrier()  # nobody sends anything before all have looked
        begin = time.perf_counter()
        result = work()
        accelerator.synchronize(device)
        seconds = time.perf_counter() - begin
        torch_dist.barrier()
        sent = self._sent() - before
        torch_dist.barrier()
        return seconds, sent, result

    def _sent(self) -> int:
        return int(Path(self.file).read_text()) if self.file else 0


def slowest(seconds: List[float]) -> List[float]:
    """Of each figure the largest of all ranks."""
    tensor = torch.tensor(seconds, dtype=torch.float64)
    torch_dist.all_reduce(tensor, torch_dist.ReduceOp.MAX)
    return tensor.tolist()


def measure(setting: Dict[str, Any], meter: Meter, noise: Tensor) -> Dict[str, Any]:
    """All ways in one setting: milliseconds, bytes, and whether the result was right."""
    rank, ranks = torch_dist.get_rank(), torch_dist.get_world_size()
    held = setting['held']
    pool = Pool(held, setting['shape'], noise)
    part = slice(0, sum(held))
    if setting['exchange'] == 'balance':
        part = pool.slice_of(rank, [sum(held) // ranks] * ranks)
    device = meter.context.device
    samples = pool.samples(pool.slice_of(rank, held), device)
    job = Exchange(samples, part, pool.shape, device)
    ways = {way: WAYS[setting['exchange']][way] for way in setting['ways']}
    wrong: List[float] = []
    times: Dict[str, List[float]] = {name: [] for name in ways}
    sent: Dict[str, List[float]] = {name: [] for name in ways}

    def take_turns(check: bool) -> None:
        for name, way in ways.items():
            seconds, bytes_, result = meter.measure(lambda way=way: way(job))
            times[name].append(seconds * 1e3)
            sent[name].append(bytes_ - meter.idle)
            if check:
                wrong.append(0.0 if pool.holds(result, part) else 1.0)
            del result  # before another pool is made

    take_turns(check=True)
    first = slowest([sum(values) for values in zip(*times.values())])[0]
    rounds = min(max(int(LONG_ENOUGH * 1e3 / first), FEWEST_ROUNDS), MOST_ROUNDS)
    if first < LONG_ENOUGH * 1e3:
        # Warming up matters where an exchange is short.
        times, sent = {name: [] for name in ways}, {name: [] for name in ways}
    while len(times[setting['ways'][0]]) < rounds:
        take_turns(check=False)
    all_sent = torch.tensor([statistics.median(sent[name]) for name in ways])
    torch_dist.all_reduce(all_sent)
    return dict(
        setting,
        ms={name: statistics.median(slowest(values)) for name, values in times.items()},
        sent=dict(zip(ways, all_sent.tolist())),
        wrong=[name for name, is_wrong in zip(ways, slowest(wrong)) if is_wrong],
        rounds=rounds,
    )


def main() -> None:
    """Measure all settings; rank 0 writes a line for each."""
    torch.set_num_threads(1)
    told = json.loads(Path(os.environ['EXCHANGE_SETTINGS']).read_text())
    context = start_device(told['device'])
    meter = Meter(context)
    noise = torch.randn(told['noise'], generator=torch.Generator().manual_seed(0), device='cpu')
    with open(os.environ['EXCHANGE_FOUND'], 'a') as file:
        for setting in told['settings']:
            found = measure(setting, meter, noise)
            if torch_dist.get_rank() == 0:
                file.write(json.dumps(found) + '\n')
                file.flush()
    torch_dist.barrier()


if __name__ == '__main__':
    main()
