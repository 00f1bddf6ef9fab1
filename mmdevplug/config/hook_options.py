"""The options of hooks: in the config key ``accelerator``, and those of checkpoints."""

from dataclasses import dataclass
from typing import Optional

from mmdevplug.errors import CheckpointError, ModelError

from .fields import Options, choice, flag, option, positive, whole


@dataclass(frozen=True)
class DeviceHookOptions(Options):
    """Options of :class:`mmdevplug.hooks.DeviceHook`."""

    key, taken_by, error = 'accelerator.hook', 'DeviceHook', ModelError

    on_mismatch: str = option(
        'repair',
        'What happens before a run to tensors that are not on the device of their rank: '
        'they are moved with a warning, or the job stops.',
        check=choice('repair', 'error'),
    )


@dataclass(frozen=True)
class MemoryOptions(Options):
    """Options of :class:`mmdevplug.hooks.MemoryHook`."""

    key, taken_by = 'accelerator.memory', 'MemoryHook'

    interval: Optional[int] = option(
        None,
        'Iterations between two collections of garbage, which also return cached memory '
        'of the device; `None` for never.',
        check=whole(1).or_none(),
    )
    sample_interval: int = option(50, 'Iterations between two samples of memory.', check=whole(1))


@dataclass(frozen=True)
class CompilationOptions(Options):
    """Options of :class:`mmdevplug.hooks.CompilationHook`."""

    key, taken_by = 'accelerator.compilations', 'CompilationHook'

    warmup: int = option(20, 'Iterations in which graphs may be compiled.', check=whole(0))
    patience: int = option(
        3,
        'Iterations after the warm-up that may compile graphs before the warning.',
        check=whole(1),
    )


@dataclass(frozen=True)
class CheckpointOptions(Options):
    """Options of :class:`mmdevplug.hooks.SafeCheckpointHook`, besides those of MMEngine's hook."""

    key, taken_by, error = 'default_hooks.checkpoint', 'SafeCheckpointHook', CheckpointError

    async_save: bool = flag(
        False,
        'Whether a thread of rank 0 writes while training goes on; training waits only '
        'for a copy in host memory. An error is raised at the next checkpoint, or at the end.',
    )
    timeout: Optional[float] = option(
        None,
        'Seconds that the other ranks wait for rank 0 to write; `None` for the timeout of '
        'the process group.',
        check=positive(infinite=True).or_none(' for the timeout of the process group'),
    )
    on_error: str = option(
        'stop',
        'What follows if a checkpoint cannot be written: all ranks stop, or they warn and '
        'try again at the next one. The last checkpoint of all stops them in any case.',
        check=choice('stop', 'continue'),
    )
    resumable_best: bool = flag(
        False,
        'Whether files of `save_best` hold what resuming needs, like all others: states of '
        'optimizers, schedulers and random numbers.',
    )
