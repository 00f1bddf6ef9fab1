"""A rank of ``cost_model.py``: starts gloo, and times all-reduces of many sizes in turn."""

import json
import os
import statistics
import time
from typing import Any, Dict, List, Tuple

import torch
from hosts import counter_file
from torch import distributed as torch_dist

#: Short all-reduces are repeated until a round takes about this long, in seconds.
ROUND_SECONDS = 0.05
MOST_REPEATS = 40


def connections() -> int:
    """The established TCP connections of this process."""
    inodes = set()
    for name in os.listdir('/proc/self/fd'):
        try:
            inodes.add(os.readlink(f'/proc/self/fd/{name}'))
        except FileNotFoundError:
            continue  # the one that listed the folder
    count = 0
    for table in ('tcp', 'tcp6'):
        with open(f'/proc/self/net/{table}') as file:
            rows = [line.split() for line in file.readlines()[1:]]
        count += sum(row[3] == '01' and f'socket:[{row[9]}]' in inodes for row in rows)
    return count


def bytes_sent() -> int:
    """What this host has sent; 0 where all ranks share the machine's own network."""
    if os.environ['GROUP_WORLD_SIZE'] == '1':
        return 0
    with open(counter_file('tx')) as file:
        return int(file.read())


class CountingStore(torch_dist.Store):
    """A store that knows what gloo asks it for."""

    def __init__(self, store: torch_dist.Store) -> None:
        super().__init__()
        self.store = store
        self.values = self.bytes = 0

    def _count(self, value: bytes) -> bytes:
        self.values += 1
        self.bytes += len(value)
        return value

    def set(self, key: str, value: Any) -> None:
        self.store.set(key, self._count(value.encode() if isinstance(value, str) else value))

    def get(self, key: str) -> bytes:
        return self._count(self.store.get(key))

    def multi_get(self, keys: List[str]) -> List[bytes]:
        return [self._count(value) for value in self.store.multi_get(keys)]

    def add(self, key: str, amount: int) -> int:
        return self.store.add(key, amount)

    def check(self, keys: List[str]) -> bool:
        return self.store.check(keys)

    def wait(self, *arguments: Any) -> None:
        self.store.wait(*arguments)

    def has_extended_api(self) -> bool:
        return self.store.has_extended_api()


def start_gloo() -> Tuple[Dict[str, Any], CountingStore]:
    """Start a process group, and tell what that took; gloo may need the store until the end."""
    rank, world_size = int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])
    store, _, _ = next(torch_dist.rendezvous('env://'))
    # All are there before the clock starts: how long Python took to start is left out.
    store.add('arrived', 1)
    while store.add('arrived', 0) < world_size:
        time.sleep(0.01)
    counting, before = CountingStore(store), connections()
    begin = time.perf_counter()
    torch_dist.init_process_group('gloo', store=counting, rank=rank, world_size=world_size)
    torch_dist.all_reduce(torch.zeros(world_size))
    seconds = time.perf_counter() - begin
    made = connections() - before
    told = dict(connections=made, store_values=counting.values, store_bytes=counting.bytes)
    return dict(told, seconds=largest(seconds)), counting


def largest(value: float) -> float:
    """The largest value of any rank."""
    tensor = torch.tensor([value], dtype=torch.float64)
    torch_dist.all_reduce(tensor, op=torch_dist.ReduceOp.MAX)
    return tensor.item()


def time_all_reduce(tensor: torch.Tensor, repeats: int) -> float:
    """Seconds of one all-reduce on the slowest rank."""
    torch_dist.barrier()
    begin = time.perf_counter()
    for _ in range(repeats):
        torch_dist.all_reduce(tensor)
    return largest((time.perf_counter() - begin) / repeats)


def work(settings: Dict[str, Any]) -> None:
    """Measure; rank 0 prints the figures."""
    torch.set_num_threads(1)
    started, store = start_gloo()
    tensors = {size: torch.zeros(max(1, size // 4)) for size in settings['sizes']}
    repeats, sent = {}, {}
    for size, tensor in tensors.items():
        time_all_reduce(tensor, 1)  # the first of a size allocates
        torch_dist.barrier()
        before = bytes_sent()
        spent = time_all_reduce(tensor, 2)
        sent[size] = (bytes_sent() - before) / 2
        repeats[size] = min(MOST_REPEATS, 1 + int(ROUND_SECONDS / spent))
    times: Dict[int, List[float]] = {size: [] for size in tensors}
    for _ in range(settings['rounds']):
        for size, tensor in tensors.items():
            times[size].append(time_all_reduce(tensor, repeats[size]))
    if torch_dist.get_rank() == 0:
        points = [
            dict(size=size, seconds=statistics.median(found), host_sent=sent[size])
            for size, found in times.items()
        ]
        print(json.dumps(dict(points=points, start=started)), flush=True)
    world_size = torch_dist.get_world_size()
    torch_dist.destroy_process_group()
    # A rank that connects only now must still find the store, which ends with rank 0.
    store.add('done', 1)
    while os.environ['RANK'] == '0' and store.add('done', 0) < world_size:
        time.sleep(0.01)


if __name__ == '__main__':
    work(json.loads(os.environ['COST_SETTINGS']))
