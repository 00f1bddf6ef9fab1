"""Start torch.distributed on any accelerator, for every launcher of MMEngine."""

import atexit
import logging
import os
import socket
import threading
from contextlib import nullcontext
from datetime import timedelta
from numbers import Real
from typing import Any, Callable, Dict, NamedTuple, Optional, Sequence, Tuple, Union

import torch
from torch import distributed as torch_dist

from mmdevplug.accelerators import (
    Accelerator,
    choose_accelerator,
    current_accelerator,
    probe_device,
    set_current_accelerator,
)
from mmdevplug.accelerators.backend import (
    backend_of,
    resolve_backend,
    takes_host_tensors,
    with_host_backend,
)
from mmdevplug.accelerators.compilation_cache import start_compilation_cache
from mmdevplug.accelerators.detection import AcceleratorConfig, Choice
from mmdevplug.environments.launch import (
    LaunchEnv,
    read_launch_env,
    read_local_rank,
    restart_count,
)
from mmdevplug.environments.loopback import is_loopback, loopback_store
from mmdevplug.environments.stale import (
    AGENT_VARIABLES,
    refuse_to_run_alone,
    stale_variables_hidden,
    unset_line,
)
from mmdevplug.errors import LaunchError
from mmdevplug.fault_tolerance.failure import current_watch, watch_for_failures
from mmdevplug.fault_tolerance.failure_watch import DEFAULT_HEARTBEAT_TIMEOUT
from mmdevplug.fault_tolerance.heartbeat import BEAT_SECONDS, enter_phase
from mmdevplug.fault_tolerance.store_barrier import LEAVE_SECONDS, raise_on_any_rank

DEFAULT_TIMEOUT = timedelta(minutes=30)  # as torch.distributed has it for gloo
Timeout = Optional[Union[Real, timedelta]]
ChooseDevices = Callable[[Accelerator, LaunchEnv], Sequence[torch.device]]


class DeviceContext(NamedTuple):
    """Where this process computes and how it talks to the others.

    Attributes:
        accelerator (Accelerator): The family of devices.
        reason (str): What decided on it.
        device (torch.device): The device of this rank.
        env (LaunchEnv): How this process was started.
        backend (str, optional): The backend of the process group, None for a single process.
        timeout (timedelta): The timeout of the process group.
        more_devices (Tuple[torch.device]): Other devices that this rank's model is spread over.
    """

    accelerator: Accelerator
    reason: str
    device: torch.device
    env: LaunchEnv
    backend: Optional[str] = None
    timeout: timedelta = DEFAULT_TIMEOUT
    more_devices: Tuple[torch.device, ...] = ()

    @property
    def devices(self) -> Tuple[torch.device, ...]:
        """All devices of this rank, the one that batches arrive on first."""
        return (self.device, *self.more_devices)

    def materialize(self) -> None:
        """Run what the devices of this rank have recorded, if they are lazy."""
        self.accelerator.materialize_all(self.devices)

    def describe(self) -> str:
        """One line for the log."""
        named = 'devices' if self.more_devices else 'device'
        line = (
            f'accelerator {self.accelerator.name!r} ({self.reason}): {named} '
            f'{", ".join(map(str, self.devices))} ({self.accelerator.device_name(self.device)})'
        )
        return line if self.backend is None else f'{line}, backend {self.backend!r}'


_context: Optional[DeviceContext] = None
_groups = 0  # process groups made in this process, as many on every rank


def device_context() -> Optional[DeviceContext]:
    """What :func:`mmdevplug.init_device` set up in this process, None before that."""
    return _context


def rank_device(config: AcceleratorConfig = None) -> Tuple[Accelerator, torch.device]:
    """The accelerator and the device of this rank, also under a stock runner.

    Args:
        config (str, dict or Accelerator, optional): See
            :func:`mmdevplug.accelerators.choose_accelerator`. Defaults to None: what
            :func:`mmdevplug.init_device` set up, or else what detection finds.
    """
    if _context is not None and config is None:
        return _context.accelerator, _context.device
    accelerator = current_accelerator() if config is None else choose_accelerator(config)[0]
    distributed = torch_dist.is_available() and torch_dist.is_initialized()
    # The CPU has room for every rank, so a missing LOCAL_RANK is nothing to stop for.
    alone = accelerator.shares_devices or not distributed
    device = accelerator.device(0 if alone else read_local_rank())
    accelerator.set_device(device)
    set_current_accelerator(accelerator)
    return accelerator, device


def group_device(group: Any = None) -> torch.device:
    """Where a process group takes tensors: on the host if it can, or else on this rank's device.

    That has nothing to do with where a result is wanted.

    Args:
        group (ProcessGroup, optional): Defaults to None: all ranks.
    """
    if takes_host_tensors(group):
        return torch.device('cpu')
    if _context is None and 'LOCAL_RANK' not in os.environ:
        # Whoever started the group without a launcher has set the device, too.
        return current_accelerator().current_device()
    return rank_device()[1]


def rank_devices() -> Tuple[torch.device, ...]:
    """All devices of this rank's model: one, unless the model is spread over several."""
    return (rank_device()[1],) if _context is None else _context.devices


def start_distributed(
    launcher: str = 'none',
    accelerator: AcceleratorConfig = None,
    forced_backend: Optional[str] = None,
    backend: Optional[str] = None,
    timeout: Optional[Real] = None,
    port: Optional[int] = None,
    init_backend: str = 'torch',
    heartbeat_timeout: Optional[Real] = None,
    compilation_cache: Optional[str] = None,
    choose_devices: Optional[ChooseDevices] = None,
    **kwargs: Any,
) -> DeviceContext:
    """Choose the accelerator, try this rank's device and start the process group.

    All ranks go through the same stages and meet after each of them, so an error of one rank
    ends all of them at once. A process group that exists already is used as it is.

    Args:
        launcher (str): ``'pytorch'``, ``'slurm'``, ``'mpi'`` or ``'none'``.
        accelerator (str, dict or Accelerator, optional): See
            :func:`mmdevplug.accelerators.choose_accelerator`. Defaults to None.
        forced_backend (str, optional): A backend that wins over ``backend``; see
            :func:`mmdevplug.accelerators.backend.resolve_backend`. Defaults to None.
        backend (str, optional): The backend of ``env_cfg.dist_cfg``. Defaults to None.
        timeout (int or float, optional): In seconds, as in MMEngine. Defaults to None: 1800.
        port (int, optional): The port of rank 0. Defaults to None: ``MASTER_PORT``.
        init_backend (str): ``'torch'``, or ``'deepspeed'``, which uses the same process group.
        heartbeat_timeout (int or float, optional): After how many seconds without a sign of life
            a rank is given up and the others end, at most ``timeout``. Defaults to None: 60.
        compilation_cache (str, optional): A folder in which each rank keeps the graphs that it
            compiles. Defaults to None: they are not kept.
        choose_devices (callable, optional): Told the accelerator and how this process was started,
            returns the devices of this rank. Defaults to None: the one of its local rank.
        **kwargs: Passed on to ``torch.distributed.init_process_group``.

    Returns:
        DeviceContext: Also to be had from :func:`device_context`.

    Raises:
        AcceleratorError: If an accelerator or a device cannot be used.
        LaunchError: If the launch variables or the backend are wrong.
        RankFailedError: If another rank failed.
    """
    global _context, _groups
    wait = to_timeout(timeout)
    silence = _heartbeat_timeout(heartbeat_timeout, wait)
    if init_backend not in ('torch', 'deepspeed'):
        raise LaunchError(
            f"env_cfg.dist_cfg.init_backend={init_backend!r}: expected 'torch' or 'deepspeed'. "
            f'Remove the key.'
        )
    env = read_launch_env(launcher, port=port)
    exists = torch_dist.is_available() and torch_dist.is_initialized()
    if launcher != 'none' and not exists:
        _refuse_meeting_places(kwargs)
    if launcher == 'none' and not exists:
        refuse_to_run_alone()
    store = None
    if launcher != 'none' and not exists:
        env.export()
        enter_phase('set-up')
        store = _rendezvous(env, wait)
        if env.world_size > 1:
            watch_for_failures(store, _second_connection(env, wait), env, silence)

    def prepare() -> Tuple[Choice, Sequence[torch.device]]:
        choice = choose_accelerator(accelerator)
        if compilation_cache is not None:
            start_compilation_cache(choice.accelerator, compilation_cache, env.rank)
        if choose_devices is None:
            devices: Sequence[torch.device] = [choice.accelerator.device(env.local_rank)]
        else:
            devices = choose_devices(choice.accelerator, env)
        # The first one last, so that it stays the current one.
        for device in reversed(devices):
            probe_device(choice.accelerator, device)
        return choice, devices

    # Without a launcher the variables stay as they are, but no vendor's package must read them.
    with stale_variables_hidden('none') if launcher == 'none' else nullcontext():
        (chosen, reason), devices = _together(prepare, store, env, 'device check', wait)
    name = None
    if launcher != 'none' and exists:
        name = torch_dist.get_backend()
        if name == 'undefined':  # that of init_process_group() without a backend
            name = backend_of()
    elif launcher != 'none':
        name = _together(
            lambda: resolve_backend(chosen, forced_backend, backend), store, env, 'backend', wait
        )
        started = with_host_backend(name, chosen)
        _use_loopback(env, started)
        # torchrun's store outlives a process group; a second one would read the first's addresses.
        _groups += 1
        fresh = torch_dist.PrefixStore(f'mmdevplug/group/{_groups}', store)

        def start() -> None:
            torch_dist.init_process_group(
                started,
                store=fresh,
                rank=env.rank,
                world_size=env.world_size,
                timeout=wait,
                **kwargs,
            )

        # PyTorch lets one rank leave while others still connect: an error of rank 0 just after
        # would take the store from them.
        _together(start, store, env, 'process group', wait)
        if _groups == 1:
            # Called before the end of the threads of `watch_for_failures`, which came first.
            atexit.register(_end_groups)
    set_current_accelerator(chosen)
    _context = DeviceContext(chosen, reason, devices[0], env, name, wait, tuple(devices[1:]))
    return _context


def _end_groups() -> None:
    """End the process groups before the interpreter ends.

    Ranks end in this order: process groups, the threads of the failure watch, the connections to
    the store. A thread of gloo may still hold tensors of the last collective; it frees them with
    Python's help, and where Python has gone meanwhile PyTorch aborts the process ("terminate
    called without an active exception").
    """
    watch = current_watch()
    if not torch_dist.is_initialized() or (watch is not None and watch.ending):
        return  # A rank that failed may have collectives under way that never complete.
    ending = threading.Thread(target=_destroy_groups, name='mmdevplug-groups', daemon=True)
    ending.start()
    ending.join(LEAVE_SECONDS)


def _destroy_groups() -> None:
    try:
        torch_dist.destroy_process_group()
    except RuntimeError as error:
        # This rank is done; the backend has lost others that are.
        logging.getLogger(__name__).debug('process groups ended with %s', error)


def _together(
    function: Callable[[], Any], store: Any, env: LaunchEnv, stage: str, timeout: timedelta
) -> Any:
    """Call a function and raise on every rank if it raises on any."""
    result, error = None, None
    try:
        result = function()
    except Exception as caught:
        error = caught
    if store is None:
        if error is not None:
            raise error
        return result
    raise_on_any_rank(store, env, stage, error, timeout)
    return result


def _refuse_meeting_places(options: Dict[str, Any]) -> None:
    """Refuse options that say where and as whom ranks meet, which launchers say.

    Args:
        options (dict): Of ``init_process_group``. ``init_method='env://'``, which says to ask the
            launcher, is removed.

    Raises:
        LaunchError: If there is one.
    """
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
    """Check a timeout.

    Args:
        seconds (float or timedelta, optional): In seconds; None for the default.
        default (timedelta): Defaults to that of gloo.
        name (str): What to call it in the message.

    Raises:
        LaunchError: If it is no time.
    """
    if seconds is None:
        return default
    if isinstance(seconds, timedelta):
        return seconds
    if isinstance(seconds, bool) or not isinstance(seconds, Real) or not seconds > 0:
        raise LaunchError(
            f'{name}={seconds!r}: expected a number of seconds above 0, e.g. '
            f'dist_cfg=dict(timeout=1800).'
        )
    return timedelta(seconds=float(seconds))


def _heartbeat_timeout(seconds: Optional[Real], timeout: timedelta) -> float:
    shortest = 3 * BEAT_SECONDS
    if seconds is None:
        seconds = DEFAULT_HEARTBEAT_TIMEOUT
    elif isinstance(seconds, bool) or not isinstance(seconds, Real) or not seconds >= shortest:
        raise LaunchError(
            f'accelerator.heartbeat_timeout={seconds!r}: expected a number of seconds, '
            f'{shortest:g} or more. Remove the key for {DEFAULT_HEARTBEAT_TIMEOUT:g}.'
        )
    return max(shortest, min(float(seconds), timeout.total_seconds()))


def _first_sentence(error: Exception) -> str:
    """What happened, without PyTorch's list of C++ frames."""
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0].rstrip('. ') + '.'


_HELD_BY_TORCHRUN = (
    ' TORCHELASTIC_USE_AGENT_STORE=True says that torchrun holds the store; if torchrun did not '
    f'start this process, remove what it left: {unset_line(AGENT_VARIABLES)}'
)


def _rendezvous(env: LaunchEnv, timeout: timedelta) -> Any:
    """Get the store that all ranks share, before any backend is chosen."""
    attempt = restart_count()
    by_agent = os.environ.get('TORCHELASTIC_USE_AGENT_STORE') == 'True'
    held = None
    if env.rank == 0 and env.single_host and is_loopback(env.master_addr) and not by_agent:
        held = loopback_store(env.master_port, env.master_addr, timeout)
    try:
        store, _, _ = next(torch_dist.rendezvous('env://', timeout=timeout))
    except (RuntimeError, ValueError) as error:
        raise LaunchError(
            f'{env.describe()} cannot reach the store at MASTER_ADDR={env.master_addr!r} '
            f'MASTER_PORT={env.master_port} within {timeout.total_seconds():.0f} s: '
            f'{_first_sentence(error)} Check that rank 0 runs there, that all {env.world_size} '
            f'ranks were started with the same values, and that the port is free and not behind a '
            f'firewall.' + (_HELD_BY_TORCHRUN if by_agent else '')
        ) from error
    del held  # The store above is another name of it.
    store.set_timeout(timeout)
    # torchrun's store outlives its workers: what a failed attempt left there must not be read.
    return torch_dist.PrefixStore(f'mmdevplug/attempt/{attempt}', store)


def _second_connection(env: LaunchEnv, timeout: timedelta) -> Any:
    """A connection to the store that is free while the main thread waits in the other one."""
    store = torch_dist.TCPStore(
        env.master_addr, env.master_port, timeout=timeout, wait_for_workers=False
    )
    return torch_dist.PrefixStore(f'mmdevplug/watch/{restart_count()}', store)


def _use_loopback(env: LaunchEnv, backend: str) -> None:
    """Keep gloo of a single-host job on the loopback interface.

    By itself gloo looks up the host's name, which fails on many machines and otherwise listens on
    a network that the job does not need.
    """
    if 'gloo' not in backend or not env.single_host or 'GLOO_SOCKET_IFNAME' in os.environ:
        return
    loopback = [name for _, name in socket.if_nameindex() if name in ('lo', 'lo0')]
    if loopback:
        os.environ['GLOO_SOCKET_IFNAME'] = loopback[0]
