"""Notice ranks of one host that dispatch a model to the same devices."""

import os
import warnings
from typing import Any, Sequence

import psutil
import torch
from torch import distributed as torch_dist

from mmdevplug.accelerators import get_accelerator
from mmdevplug.environments.launch_variables import find_job
from mmdevplug.errors import PlacementError
from mmdevplug.staged.shared_memory import host_name


def claim_devices(devices: Sequence[str]) -> None:
    """Note in the store of the job which devices this rank takes, without waiting for others.

    The rank that comes second finds what the first one noted. That is an error where the model is
    spread over several devices that are certainly the same; else it may be meant: a warning.

    Args:
        devices (Sequence[str]): Of a plan. The host, which all ranks share, counts for none.

    Raises:
        PlacementError: If another rank of this host has a model on one of several devices.
    """
    cards = [torch.device(name) for name in devices if name != 'cpu']
    in_group = torch_dist.is_available() and torch_dist.is_initialized()
    world = torch_dist.get_world_size() if in_group else int(os.environ.get('WORLD_SIZE', 1))
    if world == 1 or not cards:
        return
    if in_group:
        rank, store = torch_dist.get_rank(), torch_dist.distributed_c10d._get_default_store()
    else:
        rank, store = int(os.environ.get('RANK', 0)), _store_of_agent()
    if store is None:
        warnings.warn(
            f'WORLD_SIZE={world}, but no process group has a store yet: dispatch() cannot see '
            f'whether another rank has a model on {", ".join(devices)}, too. Call '
            f'torch.distributed.init_process_group() before dispatch().',
            stacklevel=3,
        )
        return
    uuids, holders = [_uuid(card) for card in cards], {}
    for card, uuid in zip(cards, uuids):
        accelerator = get_accelerator(card.type)
        identity = uuid or f'{card.type}:{accelerator.device_id(card)}'
        holder = _claim(store, f'mmdevplug/dispatch/{host_name()}/{identity}', rank)
        if holder != rank:
            holders[str(card)] = f'rank {holder}'
    if not holders:
        return
    count, kind = len(cards), cards[0].type
    own = '{local_rank}'
    if count > 1:
        own = f'{{{count} * local_rank}}-{{{count} * local_rank + {count - 1}}}'
    message = (
        f'rank {rank} dispatches a model to {", ".join(holders)}, where '
        f'{", ".join(dict.fromkeys(holders.values()))} of this host has one already: they share '
        f'its memory and wait for each other. This process sees {accelerator.device_count()} '
        f'{kind} device(s). Start fewer ranks, or give each rank devices of its own: '
        f"local_rank = int(os.environ['LOCAL_RANK']), plan(model, f'{kind}:{own}', ...)."
    )
    # Ranks that torchrun did not start may see other devices under the same names, and PJRT may
    # count those of each process from 0.
    certain = all(uuids) or ('GROUP_RANK' in os.environ and kind != 'xla')
    if count > 1 and certain:
        raise PlacementError(message)
    warnings.warn(message, stacklevel=3)


def _store_of_agent() -> Any:
    """The store of torchrun, which is there before a process group is; None under others."""
    from torch.distributed.rendezvous import rendezvous  # PyTorch may be built without it

    job = find_job()
    if job is None or job.environ.get('TORCHELASTIC_USE_AGENT_STORE') != 'True':
        return None
    return next(iter(rendezvous('env://')))[0]


def _uuid(card: torch.device) -> str:
    """What tells a device from others of any process, '' where the vendor does not say."""
    read = getattr(getattr(torch, card.type, None), 'get_device_properties', None)
    return str(getattr(read(card), 'uuid', '')) if read is not None else ''


def _claim(store: Any, key: str, rank: int) -> int:
    """Note this rank for a device, unless one that still runs is noted; return which is."""
    ours = f'{rank} {os.getpid()}'
    holder = store.compare_set(key, '', ours).decode()
    other, pid = map(int, holder.split())
    if other != rank and not psutil.pid_exists(pid):  # of ranks before a restart
        holder = store.compare_set(key, holder, ours).decode()
    return int(holder.split()[0])
