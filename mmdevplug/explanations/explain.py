"""Catch an error of another library, find the explanation that fits, and raise that instead."""

import traceback
from contextlib import contextmanager
from typing import Any, Iterator

from mmengine.runner.loops import _InfiniteDataloaderIterator

from mmdevplug.data.checking import no_batch_error
from mmdevplug.fault_tolerance.failure import fail_together

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
            with explain_shared_memory(runner, stage), _explain_no_batch():
                yield


@contextmanager
def _explain_no_batch() -> Iterator[None]:
    """Replace the StopIteration of MMEngine's iterator by an error that names the data."""
    try:
        yield
    except StopIteration as error:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            data = frame.f_locals.get('self')
            if isinstance(data, _InfiniteDataloaderIterator):
                # A RuntimeError caused by a StopIteration is one of Python's own to contextlib.
                raise no_batch_error(data._dataloader) from None
        raise
