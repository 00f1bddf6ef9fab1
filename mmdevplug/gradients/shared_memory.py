"""Share memory between the ranks of one host.

Each rank makes an anonymous file in memory and opens those of the others through ``/proc``. The
files have no names, so nothing stays behind when a job is killed. ``/dev/shm`` is not used: it is
small in containers.
"""

import logging
import mmap
import os
from typing import Any, Dict, List, NamedTuple, Optional

import torch
from mmengine.logging import print_log
from torch import Tensor, distributed as torch_dist

from mmdevplug.distributed.json_messages import gather_json


class Hosts(NamedTuple):
    """Describe which ranks share a host.

    Attributes:
        ranks (List[List[int]]): For each host its ranks, in ascending order; ranks are those of
            the process group.
        here (int): The index of this rank's host.
        local_rank (int): The index of this rank among those of its host.
    """

    ranks: List[List[int]]
    here: int
    local_rank: int

    @property
    def local_world_size(self) -> int:
        """Return the number of ranks on this host."""
        return len(self.ranks[self.here])

    @property
    def even(self) -> bool:
        """Tell whether all hosts have the same number of ranks."""
        return len({len(ranks) for ranks in self.ranks}) == 1


def find_hosts(group: Any = None) -> Hosts:
    """Find out which ranks share a host.

    A host is a kernel with a network of its own, so that containers and network namespaces count
    as hosts.

    Args:
        group (ProcessGroup, optional): Defaults to None: all ranks.
    """
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
    """Give each rank of a host a slot that all ranks of this host can read and write.

    Args:
        size (int): Bytes in a slot, equal on all ranks.
        hosts (Hosts): Which ranks share a host.
        group (ProcessGroup, optional): Defaults to None: all ranks.

    Returns:
        List[Tensor] or None: One-dimensional uint8 tensors of ``size`` bytes, one for each rank of
        this host in their order; None on all ranks if any could not share.
    """
    file, error = _reserve(size)
    inode = None if file is None else os.fstat(file).st_ino
    files = gather_json(dict(pid=os.getpid(), file=file, inode=inode, error=error), group)
    slots: List[Tensor] = []
    errors = [f'rank {rank}: {other["error"]}' for rank, other in enumerate(files)]
    failed = [text for text, other in zip(errors, files) if other['error'] is not None]
    error = None
    if not failed:
        slots, error = _open([files[rank] for rank in hosts.ranks[hosts.here]], size)
        # Each rank keeps its file open until all ranks have opened it: this message waits.
        answers = gather_json(error, group)
        failed = [f'rank {rank}: {text}' for rank, text in enumerate(answers) if text is not None]
    if file is not None:
        os.close(file)
    if not failed:
        return slots
    if torch_dist.get_rank(group) == 0:
        print_log(
            f'Gradients travel between the ranks of a host over its loopback interface, because '
            f'they cannot share memory: {failed[0]}',
            'current',
            logging.WARNING,
        )
    return None


def _reserve(size: int) -> Any:
    """Make a file in memory, and allocate its pages while a lack of memory is still an error."""
    file = None
    try:
        file = os.memfd_create('mmdevplug-gradients')
        os.posix_fallocate(file, 0, size)
        return file, None
    except (OSError, AttributeError) as error:
        if file is not None:
            os.close(file)
        return None, f'{type(error).__name__}: {error} (asked for {size} bytes)'


def _open(owners: List[Dict[str, Any]], size: int) -> Any:
    slots = []
    try:
        for owner in owners:
            file = os.open(f'/proc/{owner["pid"]}/fd/{owner["file"]}', os.O_RDWR)
            try:
                if os.fstat(file).st_ino != owner['inode']:
                    return [], f'process {owner["pid"]} is another one in this PID namespace'
                memory = mmap.mmap(file, size)
            finally:
                os.close(file)
            slots.append(torch.frombuffer(memory, dtype=torch.uint8))
    except OSError as error:
        return [], f'{type(error).__name__}: {error}'
    return slots, None
