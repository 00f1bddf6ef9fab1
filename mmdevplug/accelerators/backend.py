"""Choose the backend of torch.distributed for an accelerator."""

import re
from typing import Any, List, Optional

from torch import distributed as torch_dist

from mmdevplug.errors import LaunchError

from . import HOST_BACKENDS, Accelerator, registered_device_types

#: Under these MMEngine sends its own messages in tensors of that device type, and in host tensors
#: under all others.
KNOWN_TO_MMENGINE = dict(nccl='cuda', smddp='cuda', hccl='npu', cncl='mlu', mccl='musa')


def available_backends() -> List[str]:
    """The backends that this PyTorch can start, vendors' plug-ins included."""
    present = {
        'gloo': getattr(torch_dist, 'is_gloo_available', lambda: True)(),
        'nccl': torch_dist.is_nccl_available(),
        'mpi': torch_dist.is_mpi_available(),
        'ucc': getattr(torch_dist, 'is_ucc_available', lambda: False)(),
        'xccl': getattr(torch_dist, 'is_xccl_available', lambda: False)(),
    }
    listed = getattr(torch_dist.Backend, 'backend_list', list(present))
    plugged_in = [name for name in listed if name not in present and name != 'undefined']
    return sorted([name for name, there in present.items() if there] + plugged_in)


def backend_of(group: Any = None) -> str:
    """Ask a process group which backend carries tensors of which device type.

    Args:
        group (ProcessGroup, optional): Defaults to None: all ranks.

    Returns:
        str: One for each device type, e.g. ``'cpu:gloo,npu:hccl'``; in PyTorch 1, whose groups
        have one backend for all tensors, its name.
    """
    ask = getattr(torch_dist.distributed_c10d, 'get_backend_config', None)
    return str(torch_dist.get_backend(group) if ask is None else ask(group)).lower()


def takes_host_tensors(group: Any = None) -> bool:
    """Ask a process group whether its collectives take tensors of the host.

    Those of a vendor's library (nccl, hccl, cncl) take tensors of its own device alone.

    Args:
        group (ProcessGroup, optional): Defaults to None: all ranks.
    """
    backend = backend_of(group)
    if ':' in backend:
        backend = dict(part.split(':', 1) for part in backend.split(',')).get('cpu', '')
    return backend in HOST_BACKENDS or 'cpu' in registered_device_types(backend)


def check_backend(backend: str, accelerator: Accelerator, origin: str) -> str:
    """Refuse a backend that cannot work on an accelerator, before a process group is made.

    Args:
        backend (str): The backend asked for, e.g. ``'gloo'`` or ``'nccl'``.
        accelerator (Accelerator): The accelerator of this process.
        origin (str): The config key that named it, for messages.

    Returns:
        str: The backend in lower case.

    Raises:
        LaunchError: If the backend is unknown here or belongs to other devices.
    """
    if not isinstance(backend, str):
        raise LaunchError(
            f"{origin}={backend!r}: expected the name of a backend, e.g. 'gloo'. Available here: "
            f'{", ".join(available_backends())}.'
        )
    backend = backend.lower()
    names = _names(backend, origin)
    available = available_backends()
    # Gloo works everywhere: where it does not take the tensors, they are staged on the host.
    if not (set(names) & set(HOST_BACKENDS) or accelerator.takes_tensors(backend)):
        wanted = [name for name in (accelerator.native_backend, 'gloo') if name in available]
        raise LaunchError(
            f'{origin}={backend!r}, but {backend!r} does not work on accelerator '
            f'{accelerator.name!r} ({accelerator.device_type} tensors); expected '
            f'{" or ".join(map(repr, wanted))}. Available here: {", ".join(available)}. Set '
            f"accelerator=dict(type={accelerator.name!r}, backend='gloo') in the config."
        )
    if not set(names) <= set(available):
        raise LaunchError(
            f'{origin}={backend!r} is not available in this PyTorch; available: '
            f'{", ".join(available)}. Install the package that brings it, or set '
            f"accelerator=dict(type={accelerator.name!r}, backend='gloo') in the config."
        )
    return backend


def _names(backend: str, origin: str) -> List[str]:
    """The backends in a name, or in one for each device type: ``'cpu:gloo,cuda:nccl'``."""
    parts = backend.split(',')
    if len(parts) == 1 and ':' not in backend:
        return parts
    if any(re.fullmatch(r'\w+:\w+', part) is None for part in parts):
        raise LaunchError(
            f"{origin}={backend!r}: expected a name, e.g. 'gloo', or one for each device type, "
            f"e.g. 'cpu:gloo,cuda:nccl'."
        )
    return [part.split(':')[1] for part in parts]


def resolve_backend(
    accelerator: Accelerator, forced: Optional[str] = None, configured: Optional[str] = None
) -> str:
    """Decide on a backend.

    Args:
        accelerator (Accelerator): The accelerator of this process.
        forced (str, optional): ``accelerator.backend`` of the config: a name that wins over
            ``env_cfg``, or ``'auto'`` to take ``env_cfg``'s where it suits the device and the
            device's default elsewhere. Defaults to None.
        configured (str, optional): ``env_cfg.dist_cfg.backend``. Defaults to None.

    Returns:
        str: A backend that works here.

    Raises:
        LaunchError: If the backend asked for does not.
    """
    if forced not in (None, 'auto'):
        return check_backend(forced, accelerator, 'accelerator.backend')
    if configured is None:
        return accelerator.default_backend()
    try:
        return check_backend(configured, accelerator, 'env_cfg.dist_cfg.backend')
    except LaunchError:
        if forced != 'auto':
            raise
        return accelerator.default_backend()


def with_host_backend(backend: str, accelerator: Accelerator) -> str:
    """Add gloo for host tensors to a vendor's backend that MMEngine does not know.

    Args:
        backend (str): A checked backend.
        accelerator (Accelerator): The accelerator of this process.

    Returns:
        str: What ``init_process_group`` takes, e.g. ``'cpu:gloo,xpu:xccl'``.
    """
    known = KNOWN_TO_MMENGINE.get(backend) == accelerator.device_type
    if ':' in backend or backend in HOST_BACKENDS or known:
        return backend
    return f'cpu:gloo,{accelerator.device_type}:{backend}'
