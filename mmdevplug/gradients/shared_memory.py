"""Share memory between the ranks of one host.

Each rank makes an anonymous file in memory and opens those of the others through ``/proc``. The
files have no names, so nothing stays behind when a job is killed. ``/dev/shm`` is not used: it is
small in containers.
"""

import mmap
import os
from typing import Any, Dict, List, NamedTuple, Optional

import torch
from torch import Tensor, distributed as torch_dist

from mmdevplug.distributed.json_messages import gather_json
from mmdevplug.utils.logs import log_warning


class Hosts(NamedTuple):
    """Describe which ranks of a process group share a host."""

    ranks: List[List[int]]  # of each host, in ascending order
    here: int  # the index of this rank's host
    local_rank: int  # the index of this rank among those of its host


def find_hosts(group: Any = None) -> Hosts:
    """Find out which ranks share a host; containers and network namespaces count as hosts."""
    names = gather_json(_host_name(), group)
    ranks: Dict[str, List[int]] = {}
    for rank, name in enumerate(names):
        ranks.setdefault(name, []).append(rank)
    rank = torch_dist.get_rank(group)
    here = list(ranks).index(names[rank])
    return Hosts(list(ranks.values()), here, ranks[names[rank]].index(rank))


def _host_name() -> str:
    try:
        with open('/proc/sys/kernel/random/boot_id', encoding='ascii') as file:
            return f'{file.read().strip()}/{os.stat("/proc/self/ns/net").st_ino}'
    except OSError:
        return f'{os.uname().nodename}'


def share_slots(size: int, hosts: Hosts, group: Any = None) -> Optional[List[Tensor]]:
    """Give each rank of a host a slot of bytes that all ranks of this host can read and write.

    Returns the uint8 slots of this host's ranks, or None on all ranks if any could not share. The
    size is the same on all ranks.
    """
    file, inode, error = None, None, None
    try:
        file = os.memfd_create('mmdevplug-gradients')
        inode = os.fstat(file).st_ino
        os.posix_fallocate(file, 0, size)  # now, while a lack of memory is still an error
    except (OSError, AttributeError) as caught:
        error = f'{type(caught).__name__}: {caught} (asked for {size} bytes)'
    files = gather_json(dict(pid=os.getpid(), file=file, inode=inode, error=error), group)
    errors = [other['error'] for other in files]
    slots: List[Tensor] = []
    if not any(errors):
        try:
            slots = [_map(files[rank], size) for rank in hosts.ranks[hosts.here]]
        except OSError as caught:
            error = f'{type(caught).__name__}: {caught}'
        # Each rank keeps its file open until all ranks have opened it: this message waits.
        errors = gather_json(error, group)
    if file is not None:
        os.close(file)
    if not any(errors):
        return slots
    if torch_dist.get_rank(group) == 0:
        failed = next(f'rank {rank}: {text}' for rank, text in enumerate(errors) if text)
        log_warning(
            f'Gradients travel between the ranks of a host over its loopback interface, because '
            f'they cannot share memory: {failed}'
        )
    return None


def _map(owner: Dict[str, Any], size: int) -> Tensor:
    """Map the file of another process."""
    file = os.open(f'/proc/{owner["pid"]}/fd/{owner["file"]}', os.O_RDWR)
    try:
        if os.fstat(file).st_ino != owner['inode']:
            raise OSError(f'process {owner["pid"]} is another one in this PID namespace')
        return torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)
    finally:
        os.close(file)
