"""Start torch.distributed on any accelerator, for every launcher of MMEngine."""

import atexit
import logging
import os
import socket
import time
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from numbers import Real
from typing import Any, Callable, Dict, Optional, Sequence, Tuple, Union

import torch
from torch import distributed as torch_dist

from mmdevplug.accelerators import (
    DEFAULT_TIMEOUT,
    Accelerator,
    DeviceContext,
    choose_accelerator,
    set_device_context,
)
from mmdevplug.accelerators.backend import (
    HOST_BACKENDS,
    KNOWN_TO_MMENGINE,
    backend_of,
    resolve_backend,
    takes_host_tensors,
    with_host_backend,
)
from mmdevplug.accelerators.detection import AcceleratorConfig, Choice
from mmdevplug.accelerators.probe import probe_device
from mmdevplug.environments.launch_variables import (
    LaunchEnv,
    read_launch_env,
    refuse_to_run_alone,
    restart_count,
)
from mmdevplug.environments.loopback import is_loopback, loopback_store
from mmdevplug.environments.stale import AGENT_VARIABLES, stale_variables_hidden, unset_line
from mmdevplug.errors import LaunchError, first_line
from mmdevplug.fault_tolerance.abort import say
from mmdevplug.fault_tolerance.failure import (
    current_watch,
    enter_phase,
    fail_together,
    watch_for_failures,
)
from mmdevplug.fault_tolerance.failure_watch import REPORT_SECONDS
from mmdevplug.fault_tolerance.heartbeat import COMPILING_SECONDS
from mmdevplug.fault_tolerance.store_barrier import LEAVE_SECONDS, next_meeting, run_on_every_rank
from mmdevplug.staged import group_base as staged
from mmdevplug.utils.logs import log_warning
from mmdevplug.utils.signals import start_thread
from mmdevplug.utils.torch_compat import is_at_least

from .interface import choose_interface

_HELD_BY_TORCHRUN = (
    ' TORCHELASTIC_USE_AGENT_STORE=True says that torchrun holds the store; if torchrun did not '
    'start this process, remove what it left: '
)
#: In seconds, 31 years, for infinite ones: nanoseconds of it fit into 64 bits.
LONGEST_TIMEOUT = 1e9

Timeout = Optional[Union[float, timedelta]]
ChooseDevices = Callable[[Accelerator, LaunchEnv], Sequence[torch.device]]


def start_distributed(
    launcher: str = 'none',
    accelerator: AcceleratorConfig = None,
    forced_backend: Optional[str] = None,
    backend: Optional[str] = None,
    timeout: Optional[float] = None,
    port: Optional[int] = None,
    init_backend: str = 'torch',
    choose_devices: Optional[ChooseDevices] = None,
    **kwargs: object,
) -> DeviceContext:
    """Choose the accelerator, try this rank's device and start the process group.

    All ranks go through the same stages and meet after each of them, so an error of one rank
    ends all of them at once. A process group that exists already is used as it is. The context
    is also returned by :func:`mmdevplug.accelerators.device_context`.

    Args:
        launcher (str): ``'pytorch'``, ``'slurm'``, ``'mpi'``, ``'kubernetes'`` or ``'none'``.
        accelerator (str, dict or Accelerator, optional): See
            :func:`mmdevplug.accelerators.choose_accelerator`. Defaults to None.
        forced_backend (str, optional): A backend that wins over ``backend``; see
            :func:`mmdevplug.accelerators.backend.resolve_backend`. Defaults to None.
        backend (str, optional): The backend of ``env_cfg.dist_cfg``. Defaults to None.
        timeout (int or float, optional): In seconds, as in MMEngine. Defaults to None: 1800.
        port (int, optional): The port of rank 0. Defaults to None: ``MASTER_PORT``.
        init_backend (str): ``'torch'``, or ``'deepspeed'``, which uses the same process group.
        choose_devices (callable, optional): Takes the accelerator and a :class:`LaunchEnv`,
            returns the devices of this rank. Defaults to None: the one of its local rank.
        **kwargs: Passed on to ``torch.distributed.init_process_group``.

    Raises:
        AcceleratorError: If an accelerator or a device cannot be used.
        LaunchError: If the launch variables or the backend are wrong.
        RankFailedError: If another rank failed.
    """
    wait = to_timeout(timeout)
    if init_backend not in ('torch', 'deepspeed'):
        raise LaunchError(
            f"env_cfg.dist_cfg.init_backend={init_backend!r}: expected 'torch' or 'deepspeed'. "
            f'Remove the key.'
        )
    env = read_launch_env(launcher, port=port)
    exists = torch_dist.is_available() and torch_dist.is_initialized()
    store: Any = None
    if launcher == 'none':
        _refuse_to_train_alone(exists)
    elif not exists:
        store = _join_job(env, wait, kwargs)
    prepare = partial(_prepare_devices, accelerator, env, choose_devices)
    # Without a launcher the variables stay as they are, but no vendor's package must read them.
    with stale_variables_hidden() if launcher == 'none' else nullcontext():
        choice, devices, unsupported = run_on_every_rank(store, env, 'device check', prepare, wait)
    watch = current_watch()
    if watch is not None and choice.accelerator.compilation.lazy:
        watch.heartbeat.patience = COMPILING_SECONDS
    name = None
    if launcher != 'none' and exists:
        name = _check_group(choice.accelerator)
    elif launcher != 'none':

        def resolve() -> str:
            found = resolve_backend(choice.accelerator, forced_backend, backend)
            if not choice.accelerator.shares_devices:
                own_device = partial(_refuse_shared_device, choice.accelerator, devices[0], found)
                own_device(store, env, one_agent=launcher == 'pytorch')
            return found

        name = run_on_every_rank(store, env, 'backend', resolve, wait)
        _start_group(store, env, with_host_backend(name, choice.accelerator), wait, kwargs)
    context = DeviceContext(
        accelerator=choice.accelerator,
        reason=choice.reason,
        device=devices[0],
        env=env,
        backend=name,
        timeout=wait,
        more_devices=tuple(devices[1:]),
        unsupported_64bit_dtypes=unsupported,
    )
    set_device_context(context)
    enter_phase('after set-up')
    return context


def _refuse_to_train_alone(exists: bool) -> None:
    """Refuse a process without a launcher that is part of a job; ``exists``: by its group."""
    if not exists:
        refuse_to_run_alone()
    elif torch_dist.get_world_size() > 1:
        raise LaunchError(
            f"launcher='none', but this process is rank {torch_dist.get_rank()} of a process "
            f'group of {torch_dist.get_world_size()}; it would train alone. Pass the launcher '
            f"that started it, such as --launcher pytorch (in a script launcher='pytorch')."
        )


def _join_job(env: LaunchEnv, wait: timedelta, options: Dict[str, object]) -> 'torch_dist.Store':
    """Connect to the store of the job, and watch for failures of the other ranks."""
    _refuse_meeting_places(options)
    env.export()
    enter_phase('set-up')
    store, prefix = _rendezvous(env, wait)
    if env.world_size > 1:
        watch_for_failures(store, prefix, env, wait)
    return store


def _prepare_devices(
    config: AcceleratorConfig, env: LaunchEnv, choose_devices: Optional[ChooseDevices]
) -> Tuple[Choice, Sequence[torch.device], Tuple[str, ...]]:
    """Choose the accelerator, and try this rank's devices; also what dtypes they do not keep."""
    choice = choose_accelerator(config)
    if choose_devices is None:
        devices: Sequence[torch.device] = [choice.accelerator.device(env.local_rank)]
    else:
        devices = choose_devices(choice.accelerator, env)
    # The first one last, so that it stays the current one.
    unsupported: Sequence[str] = ()
    for device in reversed(devices):
        unsupported = probe_device(choice.accelerator, device)
    return choice, devices, tuple(unsupported)


def _refuse_shared_device(
    accelerator: Accelerator,
    device: torch.device,
    backend: str,
    store: 'torch_dist.Store',
    env: LaunchEnv,
    one_agent: bool,
) -> None:
    """Refuse a device that another rank of this host has, which a vendor's backend cannot serve.

    Over a backend that averages on the host two ranks may share a device: a warning says so.
    Nccl says so in its first collective alone. Where ranks were started by ``one_agent``, equal
    indices are equal devices; a task of Slurm may see its own device as number 0.
    """
    of_device = dict(part.split(':', 1) for part in backend.split(',') if ':' in part)
    by_host = of_device.get(device.type, backend) in HOST_BACKENDS
    identity = accelerator.hardware_id(device)
    if identity is None and one_agent:
        identity = str(accelerator.device_id(device))
    if device.type == 'cpu' or identity is None or accelerator.compilation.lazy:
        return
    from mmdevplug.utils.host import host_name

    key = f'mmdevplug/devices/{host_name()}/{device.type}:{identity}'
    holder = int(store.compare_set(key, '', str(env.rank)))
    if holder == env.rank:
        return
    seen = (
        f'LOCAL_RANK={env.local_rank}, and this process sees {accelerator.device_count()} '
        f'{accelerator.name} device(s) ({accelerator.describe_visibility()})'
    )
    if by_host:
        log_warning(
            f'ranks {holder} and {env.rank} of this host share {device}: {seen}. If that is not '
            f'meant, start one process for each device.'
        )
    else:
        gloo = f"accelerator=dict(type={accelerator.name!r}, backend='gloo')"
        if accelerator.name == 'cuda':
            gloo = f"base_config('cuda_gloo') or {gloo}"
        raise LaunchError(
            f'ranks {holder} and {env.rank} of this host would both use {device}, which backend '
            f'{backend!r} refuses: {seen}. Start one process for each device, or let them share '
            f'it over gloo: {gloo}.'
        )


def _check_group(accelerator: Accelerator) -> str:
    """Refuse a group of somebody else over which MMEngine's messages cannot travel.

    Returns its backend.
    """
    name: str = torch_dist.get_backend()
    if name == 'undefined':  # that of init_process_group() without a backend
        name = backend_of()
    kind = accelerator.device_type
    if not takes_host_tensors() and KNOWN_TO_MMENGINE.get(name) != kind:
        raise LaunchError(
            f'a process group of {name!r} exists, which takes no tensors of the host; MMEngine '
            f'sends its messages in these with a backend that it does not know. Start it with '
            f"init_process_group('cpu:gloo,{kind}:{name}'), or leave it to us."
        )
    if name == 'gloo' and accelerator.compilation.lazy and is_at_least('2.0'):
        from .lazy_collectives import refuse_collectives

        refuse_collectives(accelerator.device())
    if name == 'gloo' and not accelerator.gloo_takes_tensors:
        log_warning(
            f"a process group of 'gloo' exists, which takes no tensors of {kind}: gradients are "
            f'averaged by a group of their own, but collectives that the model calls itself are '
            f'refused. '
            f"Start it with init_process_group('staged'), after import mmdevplug.staged."
        )
    return name


def _start_group(
    store: 'torch_dist.Store',
    env: LaunchEnv,
    backend: str,
    timeout: timedelta,
    options: Dict[str, Any],
) -> None:
    # torchrun's store outlives a process group; a second one would read the first's addresses.
    fresh = torch_dist.PrefixStore(next_meeting(store, env, 'group'), store)
    place: Any = dict(store=fresh, rank=env.rank, world_size=env.world_size, timeout=timeout)
    by_gloo = 'gloo' in backend or backend == 'staged'

    def start() -> None:
        # The others wait inside of PyTorch for a rank that fails here.
        with fail_together('process group'):
            chosen = choose_interface(store, env, timeout) if by_gloo else ''
            try:
                torch_dist.init_process_group(backend, **place, **options)
            except RuntimeError as error:
                if env.single_host or not by_gloo:
                    raise
                raise LaunchError(
                    f'{env.describe()} on host {socket.gethostname()} cannot connect to the other '
                    f'hosts over gloo{chosen}: {first_line(error)}. On each host set '
                    f'GLOO_SOCKET_IFNAME to the interface whose address the others reach, e.g. '
                    f'eth0; look at what their firewalls let through.'
                ) from error

    # PyTorch lets one rank leave while others still connect: an error of rank 0 just after
    # would take the store from them.
    run_on_every_rank(store, env, 'process group', start, timeout)
    # Called before the end of the threads of `watch_for_failures`, which was registered first.
    atexit.unregister(_end_groups)
    atexit.register(_end_groups)


def _end_groups() -> None:
    """End the process groups before the interpreter ends.

    Ranks end in this order: process groups, the threads of the failure watch, the connections to
    the store. A thread of gloo may still hold tensors of the last collective. It needs the
    interpreter to free them; without it PyTorch aborts the process ("terminate called without an
    active exception").
    """
    watch = current_watch()
    if not torch_dist.is_initialized() or (watch is not None and watch.ending):
        return  # A rank that failed may have collectives under way that never complete.
    staged.end_all()  # in a time of its own
    try:
        ending = start_thread(_destroy_groups, 'mmdevplug-groups')
    except RuntimeError:  # Python 3.12.0 and 3.12.1 start no thread as late as this
        _destroy_groups()
    else:
        ending.join(LEAVE_SECONDS)


def _destroy_groups() -> None:
    try:
        torch_dist.destroy_process_group()
    except RuntimeError as error:
        # This rank is done; the backend has lost others that are.
        logging.getLogger(__name__).debug('process groups ended with %s', error)


def _refuse_meeting_places(options: Dict[str, object]) -> None:
    """Refuse options of ``init_process_group`` that the launcher sets."""
    if options.get('init_method') == 'env://':
        del options['init_method']
    for key in ('init_method', 'rank', 'world_size', 'store'):
        if key in options:
            raise LaunchError(
                f'env_cfg.dist_cfg.{key}={options[key]!r}: the launcher says which rank this is '
                f'and where ranks meet. Remove the key; MASTER_ADDR and MASTER_PORT set the place.'
            )


def to_timeout(
    seconds: Timeout, default: timedelta = DEFAULT_TIMEOUT, name: str = 'env_cfg.dist_cfg.timeout'
) -> timedelta:
    """Check a timeout in seconds, None for the default; ``name`` is what a message calls it."""
    if seconds is None:
        return default
    if isinstance(seconds, timedelta):
        return seconds
    if isinstance(seconds, bool) or not isinstance(seconds, Real) or not seconds > 0:
        raise LaunchError(
            f'{name}={seconds!r}: expected a number of seconds above 0, e.g. '
            f'dist_cfg=dict(timeout=1800).'
        )
    return timedelta(seconds=min(float(seconds), LONGEST_TIMEOUT))


def _rendezvous(env: LaunchEnv, timeout: timedelta) -> Tuple['torch_dist.Store', str]:
    """Get the store that all ranks share, before any backend is chosen, and its keys' prefix."""
    by_agent = os.environ.get('TORCHELASTIC_USE_AGENT_STORE') == 'True'
    held = None
    if env.rank == 0 and env.single_host and is_loopback(env.master_addr) and not by_agent:
        held = loopback_store(env.master_port, env.master_addr, timeout)
    try:
        store = _connect(env, timeout, holds=env.rank == 0 and not by_agent)
        # torchrun's store outlives its workers: keys of an earlier start must not be read. It
        # does not count a restart after hosts have joined or left. A host that has just joined
        # counts none; such ranks have a store of their own.
        count = restart_count() if by_agent else 0
        attempt = f'mmdevplug/attempt/{count}/{env.world_size}'
        start = store.add(f'{attempt}/starts/{env.rank}', 1)
    except (RuntimeError, ValueError) as error:
        raise LaunchError(
            f'{env.describe()} cannot reach the store at MASTER_ADDR={env.master_addr!r} '
            f'MASTER_PORT={env.master_port} within {timeout.total_seconds():.0f} s: '
            f'{first_line(error).rstrip(". ")}. Check that rank 0 runs there, that all '
            f'{env.world_size} ranks were started with the same values, and that the port is free '
            f'and not behind a firewall.'
            + (f'{_HELD_BY_TORCHRUN}{unset_line(AGENT_VARIABLES)}' if by_agent else '')
        ) from error
    del held  # `store` is connected to the same server.
    store.set_timeout(timeout)
    prefix = f'{attempt}/{start}'
    return torch_dist.PrefixStore(prefix, store), prefix


def _connect(env: LaunchEnv, timeout: timedelta, holds: bool) -> 'torch_dist.Store':
    """Connect to the store, as ``torch.distributed.rendezvous('env://')`` does.

    But without waiting for the other ranks: who is missing at the first meeting is named there.
    """
    options: Any = dict(wait_for_workers=False, multi_tenant=holds)
    if os.environ.get('USE_LIBUV') == '0' and 'use_libuv' in str(
        torch_dist.TCPStore.__init__.__doc__
    ):
        options['use_libuv'] = False
    place, began = (env.master_addr, env.master_port), time.monotonic()
    while True:
        waited = time.monotonic() - began
        seconds = min(REPORT_SECONDS, timeout.total_seconds() - waited)
        try:
            # Once a minute anew, or nobody says so when the host of the store is late.
            return torch_dist.TCPStore(
                *place, env.world_size, holds, timedelta(seconds=seconds), **options
            )
        except (RuntimeError, ValueError):
            now = time.monotonic() - began
            if now - waited < 0.9 * seconds or now >= timeout.total_seconds() - 1:
                raise
            say(f'{env.describe()} has waited {now:.0f} s for the store at {place[0]}:{place[1]}.')
