"""Differences between releases of MMEngine, with the release that makes each one unnecessary."""

from typing import Any


def batches_dropped(loop: Any) -> int:
    """How many batches a resuming IterBasedTrainLoop takes from its iterator and drops.

    MMEngine 0.10.0 drops none, nor does OneDL's, which calls ``skip_iter`` of the iterator.
    """
    from mmengine.runner import IterBasedTrainLoop
    from mmengine.runner.loops import _InfiniteDataloaderIterator

    if hasattr(_InfiniteDataloaderIterator, 'skip_iter'):
        return 0
    constants = map(str, IterBasedTrainLoop.run.__code__.co_consts)
    return loop.iter if any('Advance dataloader' in text for text in constants) else 0
