"""Catch an error of another library, find the explanation that fits, and raise that instead."""

from contextlib import contextmanager
from typing import Any, Iterator

from mmdevplug.fault_tolerance.failure import fail_together

from .arguments import explain_arguments
from .mixed_devices import explain_mixed_devices
from .no_batch import explain_no_batch
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
            with explain_shared_memory(runner, stage), explain_no_batch():
                yield
