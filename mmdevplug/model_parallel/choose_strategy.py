"""Choose the parallelism from what the user asked, what is present and how the job started."""

from typing import Any, NamedTuple, Optional, Sequence, Tuple, Union

import torch

from mmdevplug.accelerators import Accelerator
from mmdevplug.accelerators.detection import AcceleratorConfig, choose_accelerator
from mmdevplug.environments.launch import LaunchEnv, read_launch_env
from mmdevplug.errors import PlacementError
from mmdevplug.utils.byte_sizes import format_bytes

from .devices import parse_devices

#: The largest part of a device's memory that a model's weights, gradients and optimizer state may
#: take where one device is chosen: what is left is for activations.
COMFORTABLE_PART = 0.5

SINGLE_DEVICE = 'single_device'
MODEL_PARALLEL = 'model_parallel'
DATA_PARALLEL = 'data_parallel'
DATA_AND_MODEL_PARALLEL = 'data_and_model_parallel'

#: In the reason of a strategy that goes by the number of devices.
MEMORY_UNKNOWN = 'is not known'

AUTO_RULES = ('memory', 'count')

Devices = Union[None, int, str, Sequence[str]]


class TrainingStrategy(NamedTuple):
    """How a job is spread, one value for all that follows from it.

    Attributes:
        kind (str): ``'single_device'``, ``'model_parallel'`` (one process, several devices),
            ``'data_parallel'`` or ``'data_and_model_parallel'`` (each rank has several devices).
        devices (Tuple[torch.device]): Those of this rank; batches arrive on the first.
        rank (int): Index of this process.
        world_size (int): Number of processes.
        reason (str): What decided, with the figures.
    """

    kind: str
    devices: Tuple[torch.device, ...]
    rank: int
    world_size: int
    reason: str

    @property
    def is_model_parallel(self) -> bool:
        """Whether the model is spread over several devices, of which the host may be one."""
        return self.kind in (MODEL_PARALLEL, DATA_AND_MODEL_PARALLEL)

    def rows(self) -> Sequence[Tuple[str, str]]:
        """What the log's table shows."""
        return [
            ('strategy', self.kind),
            ('why', self.reason),
            ('devices of this rank', ', '.join(map(str, self.devices))),
            ('processes', f'{self.world_size}, this is rank {self.rank}'),
        ]


def resolve_strategy(
    use_model_parallel: Optional[bool] = None,
    *,
    accelerator: AcceleratorConfig = None,
    devices: Devices = None,
    env: Optional[LaunchEnv] = None,
    launcher: str = 'none',
    memory_needed: Optional[int] = None,
    memory_available: Optional[int] = None,
    auto_rule: str = 'memory',
    exclude_cpu: bool = True,
) -> TrainingStrategy:
    """Decide how to train.

    Args:
        use_model_parallel (bool, optional): True: the model is spread over several devices. False:
            never. None: in a single process with two or more devices, unless the model fits one
            of them with room to spare, where one device is faster. In a job of several processes
            None means data parallel, unless the model does not fit one device and each process
            has several.
        accelerator (str, dict or Accelerator, optional): Defaults to None: what is present.
        devices (int, str or Sequence[str], optional): How many devices each process takes, or all
            those of this host: ``'cuda:0-3'`` or ``['xla:0', 'xla:2']``; with k devices for each
            process, local rank r takes r*k to r*k+k-1. Defaults to None: all, divided among the
            processes of the host.
        env (LaunchEnv, optional): How this process was started. Defaults to None: read from the
            launcher's variables; those that an earlier job left behind are not read.
        launcher (str): Used where there is no ``env``. Defaults to ``'none'``.
        memory_needed (int, optional): Bytes that training needs on one device, without
            activations. Defaults to None: unknown.
        memory_available (int, optional): Bytes of one device. Defaults to None: as the
            accelerator tells.
        auto_rule (str): What None goes by: ``'memory'``, or ``'count'``, on with two or more
            devices whatever the model needs. Defaults to ``'memory'``.
        exclude_cpu (bool): Whether the host may hold nothing. If False, one device is enough for
            True, and ``devices`` may name ``'cpu'``. Defaults to True.

    Returns:
        TrainingStrategy: Consistent in itself.

    Raises:
        PlacementError: If what was asked for contradicts what is present; the message has the way
            out.
        LaunchError: If the launch variables are wrong.

    Examples:
        >>> resolve_strategy(False, accelerator='cpu').kind
        'single_device'
    """
    if use_model_parallel not in (True, False, None) or isinstance(use_model_parallel, int) != (
        isinstance(use_model_parallel, bool)
    ):
        raise PlacementError(
            f'model_parallel.enable={use_model_parallel!r}: expected True, False or None (decide '
            f'by what is present); on the command line --model-parallel true, false or auto.'
        )
    if auto_rule not in AUTO_RULES:
        raise PlacementError(
            f"model_parallel.auto_rule={auto_rule!r}: expected 'memory' (one device if the model "
            f"fits it with room to spare) or 'count' (several if there are two or more)."
        )
    chosen = choose_accelerator(accelerator).accelerator
    env = read_launch_env(launcher) if env is None else env
    several = env.world_size > 1
    if use_model_parallel is False:
        return _one_device(
            chosen, env, several, devices, 'model_parallel.enable=False', exclude_cpu
        )
    mine, why_so_few = _devices_of_rank(chosen, env, devices, exclude_cpu)
    if use_model_parallel:
        if len(mine) < (2 if exclude_cpu or chosen.device_type == 'cpu' else 1):
            raise PlacementError(_too_few(chosen, env, mine, why_so_few))
        return _spread(env, mine, 'model_parallel.enable=True')
    if len(mine) < 2:
        why = f'model_parallel.enable=None and {why_so_few}'
        return _one_device(chosen, env, several, devices, why, exclude_cpu)
    if memory_available is None:
        memory_available = chosen.memory_total(mine[0])
    return _by_what_it_needs(
        chosen, env, mine, memory_needed, memory_available, auto_rule, devices, exclude_cpu
    )


def _by_what_it_needs(
    accelerator: Accelerator,
    env: LaunchEnv,
    mine: Tuple[torch.device, ...],
    needed: Optional[int],
    available: Optional[int],
    auto_rule: str,
    devices: Devices,
    exclude_cpu: bool,
) -> TrainingStrategy:
    several = env.world_size > 1
    asked = f'model_parallel.enable=None, {len(mine)} devices for each process'
    if auto_rule == 'count':
        return _spread(env, mine, f"{asked}, auto_rule='count'")
    if needed is None or available is None:
        unknown = 'what the model needs' if needed is None else 'the memory of a device'
        if several:
            stays = 'and a job of several processes stays as it is'
            why = f'{asked}; {unknown} {MEMORY_UNKNOWN}, {stays}'
            return _one_device(accelerator, env, several, None, why, exclude_cpu)
        return _spread(env, mine, f'{asked}; {unknown} {MEMORY_UNKNOWN}')
    figures = (
        f'training needs {format_bytes(needed)} without activations, {mine[0]} has '
        f'{format_bytes(available)}'
    )
    if needed <= COMFORTABLE_PART * available:
        room = f'with at least {1 - COMFORTABLE_PART:.0%} to spare: one device is faster'
        why = f'{asked}; {figures}, {room}'
        return _one_device(accelerator, env, several, devices, why, exclude_cpu)
    return _spread(env, mine, f'{asked}; {figures}')


def _one_device(
    accelerator: Accelerator,
    env: LaunchEnv,
    several: bool,
    devices: Devices,
    reason: str,
    exclude_cpu: bool,
) -> TrainingStrategy:
    kind = DATA_PARALLEL if several else SINGLE_DEVICE
    if devices is not None and not isinstance(devices, int):
        listed = _parse(devices, accelerator, exclude_cpu)
        if env.local_rank < len(listed):
            device = _existing(accelerator, listed[env.local_rank])
            return TrainingStrategy(kind, (device,), env.rank, env.world_size, reason)
    device = accelerator.device(env.local_rank)
    return TrainingStrategy(kind, (device,), env.rank, env.world_size, reason)


def _spread(env: LaunchEnv, mine: Tuple[torch.device, ...], reason: str) -> TrainingStrategy:
    kind = DATA_AND_MODEL_PARALLEL if env.world_size > 1 else MODEL_PARALLEL
    return TrainingStrategy(kind, mine, env.rank, env.world_size, reason)


def _devices_of_rank(
    accelerator: Accelerator, env: LaunchEnv, devices: Devices, exclude_cpu: bool
) -> Tuple[Tuple[torch.device, ...], str]:
    """The devices that this rank takes, and why there are no more."""
    count = 1 if accelerator.shares_devices else accelerator.device_count()
    ranks = env.local_world_size or env.world_size
    seen = (
        f'this process sees {count} {accelerator.name} device(s) '
        f'({accelerator.describe_visibility()})'
    )
    if devices is None or isinstance(devices, int):
        each = count // ranks if devices is None else _check_count(devices)
        if devices is not None and ranks * each > count:
            raise PlacementError(
                f'model_parallel.devices={devices}: {ranks} process(es) on this host with {each} '
                f'device(s) each need {ranks * each}, but {seen}. Take fewer devices or processes.'
            )
        listed = [torch.device(accelerator.device_type, i) for i in range(count)]
        why = seen if ranks == 1 else f'{seen} for {ranks} processes'
    else:
        named = _parse(devices, accelerator, exclude_cpu)
        listed = [_existing(accelerator, device) for device in named]
        if len(listed) % ranks:
            raise PlacementError(
                f'model_parallel.devices names {len(listed)} devices for {ranks} processes on '
                f'this host; expected a multiple. Give each process as many.'
            )
        each = len(listed) // ranks
        why = f'model_parallel.devices={devices!r} gives this process {each}'
    first = env.local_rank * each
    return tuple(listed[first : first + each]), why


def _check_count(devices: int) -> int:
    if isinstance(devices, bool) or devices < 1:
        raise PlacementError(
            f'model_parallel.devices={devices!r}: expected how many devices each process takes (1 '
            f"or more), or names such as 'cuda:0-3'."
        )
    return devices


def _parse(devices: Any, accelerator: Accelerator, exclude_cpu: bool) -> Sequence[torch.device]:
    names = parse_devices(devices, exclude_cpu=exclude_cpu)
    # PyTorch knows the type of a vendor's device only with the vendor's package.
    other = [name for name in names if name.split(':')[0] not in (accelerator.device_type, 'cpu')]
    if other:
        raise PlacementError(
            f'model_parallel.devices={devices!r} names {", ".join(other)}, but accelerator '
            f'{accelerator.name!r} has devices {accelerator.device_type}:<index>. Name those, or '
            f'choose the other accelerator.'
        )
    if accelerator.device_type != 'cpu':  # the host holds what the devices of a rank do not
        names = [name for name in names if name != 'cpu']
    return [torch.device(name) for name in names]


def _existing(accelerator: Accelerator, device: torch.device) -> torch.device:
    count = accelerator.device_count()
    if device.type == accelerator.device_type and (device.index or 0) >= count:
        raise PlacementError(
            f'model_parallel.devices names {device}, but this process sees {count} '
            f'{accelerator.name} device(s) ({accelerator.describe_visibility()}). Name devices '
            f'that are there, or make more visible.'
        )
    return device


def _too_few(
    accelerator: Accelerator, env: LaunchEnv, mine: Tuple[torch.device, ...], why: str
) -> str:
    ways = [f'make more devices visible ({accelerator.visible_devices_env})'] * bool(
        accelerator.visible_devices_env
    )
    if env.world_size > 1:
        ways.append('start fewer processes on this host')
    if accelerator.device_type != 'cpu':
        ways.append('let the host hold the rest with model_parallel.exclude_cpu=False')
    ways.append('set model_parallel.enable=False (--model-parallel false) for one device')
    return (
        f'model_parallel.enable=True needs two or more devices for each process, and '
        f'{env.describe()} has {len(mine)}: {why}. Choose: {"; ".join(ways)}.'
    )
