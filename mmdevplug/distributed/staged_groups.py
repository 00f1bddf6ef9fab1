"""Process groups that average on the host, beside those that a program has."""

import inspect
from typing import Any

import torch
from torch import distributed as torch_dist

from mmdevplug.accelerators import group_timeout
from mmdevplug.accelerators.backend import group_device
from mmdevplug.staged import staged_group as staged
from mmdevplug.utils.annotations import AnyGroup
from mmdevplug.utils.torch_compat import get_global_rank, is_at_least

from .group_values import values_of_group


def staged_counterpart(group: AnyGroup = None) -> staged.StagedProcessGroup:
    """The group itself if its backend is ``staged``, else one of the same ranks.

    All ranks of the group call it in the same order. Those of PyTorch 1 are not registered:
    its DDP takes none, and other code calls their methods.
    """
    group = torch_dist.group.WORLD if group is None else group
    if isinstance(group, staged.StagedProcessGroup):
        return group
    made = values_of_group(group)
    if 'staged' not in made:
        made['staged'] = _make(group)
    return made['staged']


def _make(group: AnyGroup) -> staged.StagedProcessGroup:
    staged.register()
    # A lost rank shows here at once, and in the making of a group only after the timeout.
    torch_dist.all_reduce(torch.zeros(1, device=group_device(group)), group=group)
    timeout = group_timeout()
    size = torch_dist.get_world_size(group)
    if not is_at_least('2.0'):
        members = '-'.join(str(get_global_rank(group, rank)) for rank in range(size))
        store = torch_dist.distributed_c10d._get_default_store()
        number = store.add(f'{staged.NAME}/{members}/made/{torch_dist.get_rank(group)}', 1)
        store = torch_dist.PrefixStore(f'{staged.NAME}/{members}/{number}', store)
        return staged.StagedProcessGroup(store, torch_dist.get_rank(group), size, timeout)
    options: Any = dict(backend=staged.NAME, timeout=timeout)
    if 'use_local_synchronization' in inspect.signature(torch_dist.new_group).parameters:
        options['use_local_synchronization'] = True  # since PyTorch 2.1
    return torch_dist.new_group([get_global_rank(group, rank) for rank in range(size)], **options)
