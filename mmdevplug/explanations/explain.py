"""Catch an error of another library, find the explanation that fits, and raise that instead."""

from contextlib import ExitStack, contextmanager
from typing import Any, Callable, Iterator

from torch import nn

from mmdevplug.accelerators import device_context
from mmdevplug.checkpoint.work_dir_lock import locked_work_dir
from mmdevplug.distributed.waiting import run_on_main, wait_for_everyone
from mmdevplug.environments.launch import restarts
from mmdevplug.fault_tolerance.failure import enter_phase, fail_together

from .arguments import explain_arguments
from .mixed_devices import explain_mixed_devices
from .one_value import explain_one_value
from .out_of_memory import explain_out_of_memory
from .shared_memory import explain_shared_memory
from .versions import explain_versions


@contextmanager
def explained_build(runner: Any, stage: str) -> Iterator[None]:
    """Explain an error of this rank while the runner is built, then report it to the others."""
    with fail_together(stage), explain_versions(), explain_arguments(runner.cfg):
        yield


@contextmanager
def explained(runner: Any, stage: str) -> Iterator[None]:
    """Do the same, also for errors of a loop: ``'train'``, ``'val'`` or ``'test'``."""
    with explained_build(runner, stage), explain_mixed_devices(runner, stage):
        with explain_one_value(runner, stage), explain_out_of_memory(runner, stage):
            with explain_shared_memory(runner, stage):
                yield


def train_together(runner: Any, train: Callable[[], nn.Module]) -> nn.Module:
    """Train, alone in the work directory; wait for all ranks at the end; return the model."""
    context = device_context()
    restarted = context is not None and restarts(context.env.launcher) > 0
    with explained(runner, 'train'), ExitStack() as held:
        lock = locked_work_dir(runner.work_dir, restarted)
        run_on_main('locking the work directory', lambda: held.enter_context(lock))
        enter_phase('data preparation')
        model = train()
        wait_for_everyone('end of training')
    enter_phase('after training')
    return model
