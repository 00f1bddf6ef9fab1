"""Refuse collectives over gloo of tensors of a lazy device, which gloo returns unchanged."""

import re
from typing import List

import torch

from mmdevplug.errors import LaunchError

#: Those that are registered, which they stay as long as they are kept.
_libraries: List[object] = []


def refuse_collectives(device: torch.device) -> None:
    """Let collectives of tensors of a device raise, unless a group takes them itself.

    PyTorch has no kernel of its collectives for such devices, so it calls those of the CPU with
    copies, whose results are dropped: ranks would keep their own values, without an error
    (PyTorch 2.9 and 2.13 with torch_xla 2.9 and PyTorch's lazy device). Groups of Python, such as
    ``staged``, are called before.

    Raises:
        LaunchError: From then on, by each such collective.
    """
    keys = str(torch._C._dispatch_keys(torch.empty(0, device=device)))
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith('c10d::')]
    key = re.search(r'\b(XLA|Lazy)\b', keys)
    if key is None or _libraries:
        return

    def refuse(*_: object, **__: object) -> None:
        raise LaunchError(
            f'a collective over gloo got tensors of {device.type}, which gloo takes and leaves '
            f"unchanged: each rank would keep its own values. Delete init_process_group('gloo') "
            f'from the script, so that the runner starts the group; or start it with '
            f"init_process_group('staged'), after import mmdevplug.staged."
        )

    library = torch.library.Library('c10d', 'IMPL')
    for name in names:
        if 'barrier' not in name:
            library.impl(name, refuse, key.group())
    _libraries.append(library)
