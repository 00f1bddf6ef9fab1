"""Explain that a loop which counts iterations has begun a pass over data without a batch."""

import traceback
from contextlib import contextmanager
from typing import Iterator

from mmengine.runner.loops import _InfiniteDataloaderIterator

from mmdevplug.data.checking import no_batch_error


@contextmanager
def explain_no_batch() -> Iterator[None]:
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
