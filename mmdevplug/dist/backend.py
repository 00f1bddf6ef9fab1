"""Which backend of torch.distributed carries the messages of an accelerator."""

from typing import List, Optional

from torch import distributed as torch_dist

from mmdevplug.device import Accelerator
from mmdevplug.errors import LaunchError

#: These carry host tensors.
HOST_BACKENDS = ('gloo', 'mpi', 'ucc')

#: MMEngine sends its own messages in tensors of the right device under these, and in host tensors
#: under all others.
KNOWN_TO_MMENGINE = ('nccl', 'hccl', 'cncl', 'mccl', 'smddp')


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
    names = [part.split(':', 1)[-1] for part in backend.split(',')]
    # Gloo works everywhere: where it does not take the tensors, they are staged on the host.
    if not (set(names) & set(HOST_BACKENDS) or accelerator.takes_tensors(backend)):
        wanted = [accelerator.native_backend] if accelerator.native_backend else []
        raise LaunchError(
            f'{origin}={backend!r}, but {backend!r} does not work on accelerator '
            f'{accelerator.name!r} ({accelerator.device_type} tensors); expected '
            f'{" or ".join(repr(name) for name in wanted + ["gloo"])}. Set '
            f"accelerator=dict(type={accelerator.name!r}, backend='gloo') in the config."
        )
    if not set(names) <= set(available_backends()):
        raise LaunchError(
            f'{origin}={backend!r} is not available in this PyTorch; available: '
            f'{", ".join(available_backends())}. Install the package that brings it, or set '
            f"accelerator=dict(type={accelerator.name!r}, backend='gloo') in the config."
        )
    return backend


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
    if ':' in backend or backend in HOST_BACKENDS or backend in KNOWN_TO_MMENGINE:
        return backend
    return f'cpu:gloo,{accelerator.device_type}:{backend}'
