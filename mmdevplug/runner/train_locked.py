"""Train as the only job in a work directory, and end together."""

from contextlib import ExitStack
from typing import Callable

from torch import nn

from mmdevplug.accelerators import device_context
from mmdevplug.checkpoint.work_dir_lock import locked_work_dir
from mmdevplug.distributed.waiting import run_on_main, wait_for_everyone
from mmdevplug.environments.launch_variables import restarts
from mmdevplug.fault_tolerance.failure import enter_phase
from mmdevplug.utils.annotations import AnyRunner
from mmdevplug.utils.progress import SilenceWatch

from .explain_errors import explained


def train_locked(runner: AnyRunner, train: Callable[[], nn.Module]) -> nn.Module:
    """Train, alone in the work directory; wait for all ranks at the end; return the model."""
    context = device_context()
    restarted = context is not None and restarts(context.env.launcher) > 0
    with explained(runner, 'train'), ExitStack() as held:
        held.callback(SilenceWatch.close_all)
        lock = locked_work_dir(runner.work_dir, restarted)
        run_on_main('locking the work directory', lambda: held.enter_context(lock))
        enter_phase('data preparation')
        model = train()
        wait_for_everyone('end of training')
    enter_phase('after training')
    return model
