"""Choose the backend of torch.distributed for an accelerator, and know what backends take."""

import os
import re
from typing import Dict, List, Optional, Sequence

import torch
from torch import distributed as torch_dist

from mmdevplug.errors import LaunchError, first_line
from mmdevplug.utils.annotations import AnyGroup
from mmdevplug.utils.logs import log_warning

from . import Accelerator, device_context, rank_context
from .context import current_accelerator

#: The backend of :mod:`mmdevplug.staged`, which is imported where it is used.
STAGED = 'staged'
#: Backends of torch.distributed for host tensors; what they do with others differs.
HOST_BACKENDS = ('gloo', 'mpi', 'ucc', STAGED)

#: With these MMEngine sends its messages in tensors of that device type, and with all others in
#: host tensors.
KNOWN_TO_MMENGINE = dict(nccl='cuda', smddp='cuda', hccl='npu', cncl='mlu', mccl='musa')


def available_backends() -> List[str]:
    """The backends that this PyTorch can start, those of vendors included."""
    present = {
        'gloo': getattr(torch_dist, 'is_gloo_available', lambda: True)(),
        'nccl': torch_dist.is_nccl_available(),
        'mpi': torch_dist.is_mpi_available(),
        'ucc': getattr(torch_dist, 'is_ucc_available', lambda: False)(),
        'xccl': getattr(torch_dist, 'is_xccl_available', lambda: False)(),
    }
    if present['gloo']:
        present[STAGED] = True
    listed = getattr(torch_dist.Backend, 'backend_list', list(present))
    plugged_in = [name for name in listed if name not in (*present, STAGED, 'undefined')]
    return sorted([name for name, there in present.items() if there] + plugged_in)


def backend_of(group: AnyGroup = None) -> str:
    """The backend of a process group for each device type, e.g. ``'cpu:gloo,npu:hccl'``.

    Groups of PyTorch 1 have one backend for all tensors: its name.
    """
    if torch_dist.get_backend(group) == STAGED:
        return STAGED  # for every type
    ask = getattr(torch_dist.distributed_c10d, 'get_backend_config', None)
    return str(torch_dist.get_backend(group) if ask is None else ask(group)).lower()


def takes_host_tensors(group: AnyGroup = None) -> bool:
    """Whether the collectives of a process group take host tensors, unlike those of nccl."""
    backend = _backend_for('cpu', backend_of(group))
    return backend in HOST_BACKENDS or 'cpu' in _device_types().get(backend, ())


def _backend_for(kind: str, backend: str) -> str:
    """The backend of a device type in ``'cpu:gloo,cuda:nccl'``, '' for none, or the only one."""
    if ':' not in backend:
        return backend
    return dict(part.split(':', 1) for part in backend.split(',')).get(kind, '')


def group_device(group: AnyGroup = None) -> torch.device:
    """Where a process group takes tensors: on the host if it can, else on this rank's device."""
    if takes_host_tensors(group):
        return torch.device('cpu')
    context = device_context()
    if (context is None or not context.final) and 'LOCAL_RANK' not in os.environ:
        # Whoever started the group without a launcher has set the device, too.
        return current_accelerator().current_device()
    return rank_context().device


def takes_tensors(accelerator: Accelerator, backend: str) -> bool:
    """Whether collectives of a backend, or of ``'cpu:gloo,cuda:nccl'``, take its tensors."""
    kind = accelerator.device_type
    backend = _backend_for(kind, backend)
    if backend == 'gloo':
        return accelerator.gloo_takes_tensors
    if backend in (STAGED, accelerator.native_backend):
        return True
    if accelerator.compilation.lazy or backend in HOST_BACKENDS:
        return False
    return kind in _device_types().get(backend, ())


def _device_types() -> Dict[str, Sequence[str]]:
    """The device types that each backend of torch.distributed was registered for."""
    return getattr(torch_dist.Backend, 'backend_capability', {})  # not in PyTorch 1


def waits_for_backward(accelerator: Accelerator, backend: str) -> bool:
    """Whether gradients are averaged when backward has ended, and not by PyTorch's DDP.

    So it is where tensors of a lazy device, which a copy during backward would have computed,
    travel through the host.
    """
    native = backend not in HOST_BACKENDS and takes_tensors(accelerator, backend)
    return accelerator.compilation.lazy and not native


def suits_native_ddp(
    accelerator: Accelerator, device: torch.device, group: AnyGroup = None
) -> bool:
    """Whether PyTorch's DDP can average over a native process group. All its ranks call this.

    Raises:
        LaunchError: If it cannot, and the group takes no host tensors either.
    """
    backend = backend_of(group)
    if backend == STAGED or not takes_tensors(accelerator, backend):
        return False
    if accelerator.name in ('cpu', 'cuda', 'xpu'):  # PyTorch's own backends
        return True
    work = torch_dist.all_reduce(torch.zeros(1, device=device), group=group, async_op=True)
    work.wait()
    try:
        work.get_future()
    except RuntimeError as error:  # NotImplementedError is one
        told = (
            f'backend {backend!r} of accelerator {accelerator.name!r} has no futures, which '
            f"PyTorch's DDP waits for ({first_line(error)})"
        )
        if not takes_host_tensors(group):
            raise LaunchError(
                f"{told}. Set accelerator=dict(type={accelerator.name!r}, backend='gloo') in the "
                f'config: gradients are then averaged through the host.'
            ) from error
        log_warning(f'{told}: gradients are averaged through the host.')
        return False
    return True


def check_backend(backend: str, accelerator: Accelerator, origin: str) -> str:
    """Refuse a backend that is unknown or does not work on an accelerator.

    ``origin`` is the config key that names it. Returns the backend in lower case.
    """
    if not isinstance(backend, str):
        raise LaunchError(
            f"{origin}={backend!r}: expected the name of a backend, e.g. 'gloo'. Available here: "
            f'{", ".join(available_backends())}.'
        )
    backend = backend.lower()
    if backend == 'gloo' and getattr(torch_dist, 'is_gloo_available', lambda: True)():
        return backend
    names = _names(backend, origin)
    available = available_backends()
    # Gloo works everywhere: tensors that it does not take are staged on the host.
    if not (set(names) & set(HOST_BACKENDS) or takes_tensors(accelerator, backend)):
        wanted = [name for name in (accelerator.native_backend, 'gloo') if name in available]
        raise LaunchError(
            f'{origin}={backend!r}, but {backend!r} does not work on accelerator '
            f'{accelerator.name!r} ({accelerator.device_type} tensors); expected '
            f'{" or ".join(map(repr, wanted))}. Available here: {", ".join(available)}. '
            f'{accelerator.refused_backends.get(backend, "")}Set '
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
    """The backends in ``'gloo'`` or ``'cpu:gloo,cuda:nccl'``."""
    parts = backend.split(',')
    if len(parts) == 1 and ':' not in backend:
        return parts
    if any(re.fullmatch(r'\w+:\w+', part) is None for part in parts):
        raise LaunchError(
            f"{origin}={backend!r}: expected a name, e.g. 'gloo', or one for each device type, "
            f"e.g. 'cpu:gloo,cuda:nccl'."
        )
    return [part.split(':')[1] for part in parts]


def default_backend(accelerator: Accelerator) -> str:
    """The backend of torch.distributed if a config names none."""
    native, kind = accelerator.native_backend, accelerator.device_type
    if native is not None and not hasattr(torch_dist.Backend, native.upper()):
        native = None  # another maker's device type of this name
    # torch_xla's backend runs inside graphs only.
    if native is None and not accelerator.compilation.lazy:
        registered = _device_types().items()
        native = next((name for name, types in registered if list(types) == [kind]), None)
    if kind == 'cpu' or native is None or not hasattr(torch_dist.Backend, native.upper()):
        return 'gloo'
    is_available = getattr(torch_dist, f'is_{native}_available', lambda: True)
    return native if is_available() else 'gloo'


def resolve_backend(
    accelerator: Accelerator, forced: Optional[str] = None, configured: Optional[str] = None
) -> str:
    """Choose a backend that works here: ``'staged'`` for gloo where it refuses tensors.

    Args:
        accelerator (Accelerator): The accelerator of this process.
        forced (str, optional): ``accelerator.backend`` of the config, which wins over
            ``configured``; ``'auto'`` takes that if it works on the device.
        configured (str, optional): ``env_cfg.dist_cfg.backend``. Defaults to None: the device's.

    Raises:
        LaunchError: If the requested backend does not work here.
    """
    if forced not in (None, 'auto'):
        chosen = check_backend(forced, accelerator, 'accelerator.backend')
    elif configured is None:
        chosen = default_backend(accelerator)
    else:
        try:
            chosen = check_backend(configured, accelerator, 'env_cfg.dist_cfg.backend')
        except LaunchError:
            if forced != 'auto':
                raise
            chosen = default_backend(accelerator)
    if chosen == 'gloo' and not accelerator.gloo_takes_tensors:
        from mmdevplug.staged.staged_group import register

        register()
        return STAGED
    return chosen


def with_host_backend(backend: str, accelerator: Accelerator) -> str:
    """Add gloo for host tensors to a backend unknown to MMEngine: ``'cpu:gloo,xpu:xccl'``."""
    known = KNOWN_TO_MMENGINE.get(backend) == accelerator.device_type
    if ':' in backend or backend in HOST_BACKENDS or known:
        return backend
    return f'cpu:gloo,{accelerator.device_type}:{backend}'
