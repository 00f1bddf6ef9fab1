"""Find the rank that the others wait for in every iteration, and say what is known about it."""

import socket
from statistics import median
from typing import Any, Dict, List, NamedTuple

from mmdevplug.accelerators import enter_rank_device

from .byte_exchange import gather_json

#: A rank is slow that delays the others by this part of an iteration. Less is common where ranks
#: load different data, and would not be worth a look.
SLOW = 0.2


class Slowest(NamedTuple):
    """The rank that delays the others most, by milliseconds of each iteration."""

    rank: int
    delay: float
    slow: bool  # whether the delay is worth a line in the log
    text: str


def gather_times(iteration: float, waited: float, loading: float) -> List[Dict[str, Any]]:
    """Collect the mean milliseconds of an iteration from all ranks."""
    _, device = enter_rank_device()
    times = dict(iteration=iteration, waited=waited, loading=loading)
    return gather_json(dict(times, host=socket.gethostname(), device=str(device)))


def find_slowest(ranks: List[Dict[str, Any]]) -> Slowest:
    """Compare what :func:`gather_times` collected from two ranks or more.

    Ranks average gradients together, so an iteration takes the same time on all of them, and the
    one that is slow is the one that waits least. Where rank 0 is late, the others may wait for
    its buffers instead, which nobody measures: so the time of loading is compared as well.
    """
    delays = []
    for rank, mine in enumerate(ranks):
        others = ranks[:rank] + ranks[rank + 1 :]
        waits = median(each['waited'] for each in others) - mine['waited']
        loads = mine['loading'] - median(each['loading'] for each in others)
        delays.append((max(waits, loads), waits, loads))
    rank = max(range(len(ranks)), key=lambda each: delays[each])
    delay, waits, loads = delays[rank]
    mine, rest = ranks[rank], ranks[:rank] + ranks[rank + 1 :]
    text = (
        f'rank {rank} on host {mine["host"]} ({mine["device"]}) is slow: it delays the others by '
        f'{delay:.0f} ms of {mine["iteration"]:.0f} ms in each iteration. It waits '
        f'{mine["waited"]:.0f} ms for gradients, the others '
        f'{median(each["waited"] for each in rest):.0f} ms (median). '
    )
    if loads > 0.5 * delay:
        text += (
            f'Its data take {mine["loading"]:.0f} ms to load, those of the others '
            f'{median(each["loading"] for each in rest):.0f} ms: look at its disk and at '
            f'train_dataloader.num_workers.'
        )
    else:
        text += (
            'Its data load as fast as theirs: look at what else runs on this host and on this '
            'device, and at its clock.'
        )
    return Slowest(rank, max(0.0, delay), delay >= SLOW * mine['iteration'] > 0, text)
