"""The options of checkpoints."""

from dataclasses import dataclass

from mmdevplug.errors import CheckpointError

from .fields import Options, flag


@dataclass(frozen=True)
class CheckpointOptions(Options):
    """Options of :class:`mmdevplug.hooks.SafeCheckpointHook`, besides those of MMEngine's hook."""

    key, error = 'default_hooks.checkpoint', CheckpointError

    async_save: bool = flag(
        False,
        'A thread of rank 0 writes while training continues; training waits only for a copy in '
        'host memory. An error is raised at the next checkpoint, or at the end.',
    )
    resumable_best: bool = flag(
        False,
        'Files of `save_best` have the states of optimizers, schedulers and random numbers, so '
        'that training can resume from them.',
    )
