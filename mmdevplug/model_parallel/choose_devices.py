"""Choose the parallelism from the config, the devices present and how the job started."""

import os
from typing import NamedTuple, Optional, Sequence, Tuple, Union

import torch
from torch import distributed as torch_dist

from mmdevplug.accelerators import Accelerator, device_context
from mmdevplug.accelerators.detection import AcceleratorConfig, choose_accelerator
from mmdevplug.environments.launch_variables import (
    LaunchEnv,
    find_job,
    follow_job,
    read_launch_env,
)
from mmdevplug.errors import LaunchError, PlacementError
from mmdevplug.utils.byte_sizes import format_bytes

from .parse_devices import parse_devices

#: The largest part of a device's memory that weights, gradients and optimizer state may take where
#: one device is chosen; the rest is for activations.
COMFORTABLE_PART = 0.5

SINGLE_DEVICE = 'single_device'
MODEL_PARALLEL = 'model_parallel'
DATA_PARALLEL = 'data_parallel'
DATA_AND_MODEL_PARALLEL = 'data_and_model_parallel'

#: In the reason of a strategy that the number of devices decided.
MEMORY_UNKNOWN = 'is not known'

Devices = Union[None, int, str, Sequence[str]]


class TrainingStrategy(NamedTuple):
    """How a job is spread."""

    #: ``'single_device'``, ``'model_parallel'`` (one process, several devices),
    #: ``'data_parallel'`` or ``'data_and_model_parallel'`` (each rank has several devices).
    kind: str
    devices: Tuple[torch.device, ...]  #: Those of this rank; batches arrive on the first.
    rank: int  #: Index of this process.
    world_size: int  #: Number of processes.
    reason: str  #: Why it was chosen, with the figures.

    @property
    def is_model_parallel(self) -> bool:
        """Whether the model is spread over several devices, of which the host may be one."""
        return self.kind in (MODEL_PARALLEL, DATA_AND_MODEL_PARALLEL)


def resolve_strategy(
    use_model_parallel: Optional[bool] = None,
    *,
    accelerator: AcceleratorConfig = None,
    devices: Devices = None,
    env: Optional[LaunchEnv] = None,
    launcher: str = 'none',
    memory_needed: Optional[int] = None,
    exclude_cpu: bool = True,
) -> TrainingStrategy:
    """Decide how to train.

    Args:
        use_model_parallel (bool, optional): True: the model is spread over several devices. False:
            never. None: in a single process with two or more devices, unless the model takes at
            most half of one, where one device is faster. In a job of several processes None means
            data parallel, unless the model does not fit one device and each process has several.
        accelerator (str, dict or Accelerator, optional): Defaults to None: what is present.
        devices (int, str or Sequence[str], optional): How many devices each process takes, or all
            those of this host: ``'cuda:0-3'`` or ``['xla:0', 'xla:2']``; with k devices for each
            process, local rank r takes r*k to r*k+k-1. Defaults to None: all, divided among the
            processes of the host.
        env (LaunchEnv, optional): How this process was started. Defaults to None: the process
            group, or else the launcher that started this process, says it. Variables that an
            earlier job left behind are named in a warning and not read.
        launcher (str): The launcher whose variables are read where there is no ``env``. Defaults
            to ``'none'``: it is recognized.
        memory_needed (int, optional): Bytes that training needs on one device, without
            activations. Defaults to None: unknown.
        exclude_cpu (bool): Whether the host may hold nothing. If False, one device is enough for
            True, and ``devices`` may name ``'cpu'``. Defaults to True.

    Returns:
        TrainingStrategy: The decision and its reason.

    Raises:
        PlacementError: If the arguments contradict what is present, with the ways out.
        LaunchError: If the launch variables are wrong, or tell of a job of several processes whose
            launcher is not recognized.

    Examples:
        >>> resolve_strategy(False, accelerator='cpu').kind
        'single_device'
    """
    if not (use_model_parallel is None or isinstance(use_model_parallel, bool)):
        raise PlacementError(
            f'model_parallel.enable={use_model_parallel!r}: expected True, False or None (decide '
            f'by what is present); on the command line --model-parallel true, false or auto.'
        )
    chosen = choose_accelerator(accelerator).accelerator
    choice = _Choice(chosen, _place(launcher) if env is None else env, devices, exclude_cpu)
    if use_model_parallel is False:
        return choice.one_device('model_parallel.enable=False')
    mine, why_no_more = choice.devices_of_rank()
    if use_model_parallel:
        if len(mine) < (2 if exclude_cpu or chosen.device_type == 'cpu' else 1):
            raise PlacementError(choice.too_few(mine, why_no_more))
        return choice.spread(mine, 'model_parallel.enable=True')
    if len(mine) < 2:
        return choice.one_device(f'model_parallel.enable=None and {why_no_more}')
    memory_available = chosen.memory_total(mine[0])
    why = f'model_parallel.enable=None, {len(mine)} devices for each process'
    if memory_needed is None or memory_available is None:
        unknown = 'what the model needs' if memory_needed is None else 'the memory of a device'
        why += f'; {unknown} {MEMORY_UNKNOWN}'
        if choice.env.world_size == 1:
            return choice.spread(mine, why)
        choice.devices = None
        return choice.one_device(f'{why}, and a job of several processes stays as it is')
    why += (
        f'; training needs {format_bytes(memory_needed)} without activations, {mine[0]} has '
        f'{format_bytes(memory_available)}'
    )
    if memory_needed > COMFORTABLE_PART * memory_available:
        return choice.spread(mine, why)
    room = f'with at least {1 - COMFORTABLE_PART:.0%} to spare: one device is faster'
    return choice.one_device(f'{why}, {room}')


def _place(launcher: str) -> LaunchEnv:
    """The place of this process among those of its job."""
    if launcher != 'none':
        return read_launch_env(launcher)
    context = device_context()
    if context is not None and context.final and context.env.world_size > 1:
        return context.env
    if not (torch_dist.is_available() and torch_dist.is_initialized()):
        return follow_job()
    rank, world_size = torch_dist.get_rank(), torch_dist.get_world_size()
    if world_size == 1:
        return LaunchEnv()
    job, of_rank = find_job(), ('RANK', 'WORLD_SIZE', 'LOCAL_RANK')
    found = 'the launch variables do not say'
    if job is not None or all(name in os.environ for name in of_rank):
        env = read_launch_env('pytorch') if job is None else job.read()
        if (env.rank, env.world_size) == (rank, world_size):
            return env
        found = f'the launch variables, which say rank {env.rank} of {env.world_size}, do not say'
    raise LaunchError(
        f'this process is rank {rank} of a process group of {world_size}, but {found} which '
        f'devices of its host it takes. Set {" ".join(of_rank)} before, or pass '
        f'env=mmdevplug.environments.launch_variables.LaunchEnv(rank={rank}, local_rank=..., '
        f'world_size={world_size}, local_world_size=...).'
    )


class _Choice:
    """The figures that a strategy is chosen from."""

    def __init__(
        self, accelerator: Accelerator, env: LaunchEnv, devices: Devices, exclude_cpu: bool
    ) -> None:
        self.accelerator, self.env = accelerator, env
        self.devices, self.exclude_cpu = devices, exclude_cpu

    @property
    def seen(self) -> str:
        return f'{self.accelerator.name} device(s) ({self.accelerator.describe_visibility()})'

    def one_device(self, reason: str) -> TrainingStrategy:
        env = self.env
        named = self.devices is not None and not isinstance(self.devices, int)
        listed = self._parse() if named else ()
        if env.local_rank < len(listed):
            device = self._existing(listed[env.local_rank])
        else:
            device = self.accelerator.device(env.local_rank)
        kind = DATA_PARALLEL if env.world_size > 1 else SINGLE_DEVICE
        return TrainingStrategy(kind, (device,), env.rank, env.world_size, reason)

    def spread(self, mine: Tuple[torch.device, ...], reason: str) -> TrainingStrategy:
        kind = DATA_AND_MODEL_PARALLEL if self.env.world_size > 1 else MODEL_PARALLEL
        return TrainingStrategy(kind, mine, self.env.rank, self.env.world_size, reason)

    def devices_of_rank(self) -> Tuple[Tuple[torch.device, ...], str]:
        """The devices that this rank takes, and why there are no more."""
        accelerator, devices = self.accelerator, self.devices
        count = 1 if accelerator.shares_devices else accelerator.device_count()
        ranks = self.env.local_world_size or self.env.world_size
        seen = f'this process sees {count} {self.seen}'
        if devices is None or isinstance(devices, int):
            if devices is not None and (isinstance(devices, bool) or devices < 1):
                raise PlacementError(
                    f'model_parallel.devices={devices!r}: expected how many devices each process '
                    f"takes (1 or more), or names such as 'cuda:0-3'."
                )
            each = count // ranks if devices is None else devices
            if ranks * each > count:
                raise PlacementError(
                    f'model_parallel.devices={devices}: {ranks} process(es) on this host with '
                    f'{each} device(s) each need {ranks * each}, but {seen}. Take fewer devices '
                    f'or processes.'
                )
            listed = [torch.device(accelerator.device_type, i) for i in range(count)]
            why = seen if ranks == 1 else f'{seen} for {ranks} processes'
        else:
            listed = [self._existing(device) for device in self._parse()]
            if len(listed) % ranks:
                raise PlacementError(
                    f'model_parallel.devices names {len(listed)} devices for {ranks} processes on '
                    f'this host; expected a multiple. Give each process as many.'
                )
            each = len(listed) // ranks
            why = f'model_parallel.devices={devices!r} gives this process {each}'
        first = self.env.local_rank * each
        return tuple(listed[first : first + each]), why

    def _parse(self) -> Sequence[torch.device]:
        names = parse_devices(self.devices, exclude_cpu=self.exclude_cpu)
        kind = self.accelerator.device_type
        # PyTorch knows the type of a vendor's device only with the vendor's package.
        other = [name for name in names if name.split(':')[0] not in (kind, 'cpu')]
        if other:
            raise PlacementError(
                f'model_parallel.devices={self.devices!r} names {", ".join(other)}, but '
                f'accelerator {self.accelerator.name!r} has devices {kind}:<index>. Name those, '
                f'or choose the other accelerator.'
            )
        if kind != 'cpu':  # the host holds what the devices of a rank do not
            names = [name for name in names if name != 'cpu']
        return [torch.device(name) for name in names]

    def _existing(self, device: torch.device) -> torch.device:
        count = self.accelerator.device_count()
        if device.type == self.accelerator.device_type and (device.index or 0) >= count:
            raise PlacementError(
                f'model_parallel.devices names {device}, but this process sees {count} '
                f'{self.seen}. Name devices that are present, or make more visible.'
            )
        return device

    def too_few(self, mine: Tuple[torch.device, ...], why: str) -> str:
        ways = []
        if self.accelerator.visible_devices_env:
            ways.append(f'make more devices visible ({self.accelerator.visible_devices_env})')
        if self.env.world_size > 1:
            ways.append('start fewer processes on this host')
        if self.accelerator.device_type != 'cpu':
            ways.append('let the host hold the rest with model_parallel.exclude_cpu=False')
        ways.append('set model_parallel.enable=False (--model-parallel false) for one device')
        return (
            f'model_parallel.enable=True needs two or more devices for each process, and '
            f'{self.env.describe()} has {len(mine)}: {why}. Choose: {"; ".join(ways)}.'
        )
