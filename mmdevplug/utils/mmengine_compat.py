"""Differences between releases of MMEngine, with the release that makes each one unnecessary."""

from typing import Any


def batches_dropped(loop: Any) -> int:
    """How many batches an IterBasedTrainLoop skips when it resumes; MMEngine 0.10.0 skips none."""
    from mmengine.runner import IterBasedTrainLoop

    constants = map(str, IterBasedTrainLoop.run.__code__.co_consts)
    return loop.iter if any('Advance dataloader' in text for text in constants) else 0
