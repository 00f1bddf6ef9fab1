"""Differences between releases of MMEngine, with the release that makes each one unnecessary."""

from typing import Any


def batches_dropped(loop: Any) -> int:
    """How many batches MMEngine's loop over iterations drops before it goes on.

    Args:
        loop (IterBasedTrainLoop): It resumes.

    Returns:
        int: As many as it has done; 0 with MMEngine 0.10.0, which drops none.
    """
    from mmengine.runner import IterBasedTrainLoop

    said = map(str, IterBasedTrainLoop.run.__code__.co_consts)
    return loop.iter if any('Advance dataloader' in text for text in said) else 0
