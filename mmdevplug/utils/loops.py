"""Look into loops, of which MMEngine promises ``run()`` and nothing else."""

import sys
from typing import Any, List, Optional, Tuple

from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop
from torch.utils.data import DataLoader

from mmdevplug.utils.annotations import AnyLoop, AnyRunner

#: The length of the loader of a stream, for those that ask: its end does not come.
UNKNOWN = sys.maxsize


def loops_of(runner: AnyRunner) -> List[Tuple[str, AnyLoop]]:
    """List the loops for training and validation that a runner has built, with these names."""
    found = [(kind, getattr(runner, f'_{kind}_loop', None)) for kind in ('train', 'val')]
    return [
        (kind, loop) for kind, loop in found if loop is not None and not isinstance(loop, dict)
    ]


def loader_of(loop: AnyLoop) -> Any:
    """Return the data loader of a loop that calls it ``dataloader``, as MMEngine's do, or None."""
    return getattr(loop, 'dataloader', None)


def loaders_of(loop: AnyLoop) -> List[object]:
    """List the data loaders of a loop, whatever attributes hold them."""
    own = loader_of(loop)
    found = [] if own is None else [own]
    for each in _parts(loop):
        if isinstance(each, DataLoader) and each is not own:
            found.append(each)
    return found


def metrics_of(loop: AnyLoop) -> List[object]:
    """List the metrics of all evaluators of a loop, whatever attributes hold these."""
    found: List[object] = []
    for each in _parts(loop):
        found += getattr(each, 'metrics', None) or ()
    return found


def _parts(loop: AnyLoop) -> List[object]:
    """List the values of a loop's attributes, also in lists: each once, in a fixed order."""
    held: List[object] = []
    for value in getattr(loop, '__dict__', {}).values():
        held += value if isinstance(value, (list, tuple)) else [value]
    return list(dict(zip(map(id, held), held)).values())


def length_of(thing: Any) -> Optional[int]:
    """Return ``len(thing)``, None where it is unknown, such as for an ``IterableDataset``."""
    try:
        return None if len(thing) == UNKNOWN else len(thing)
    except (TypeError, NotImplementedError, AttributeError):
        return None


def progress_of(loop: AnyLoop) -> Optional[Tuple[int, int]]:
    """How many epochs or iterations were trained, and of how many; None for an unknown loop."""
    if isinstance(loop, EpochBasedTrainLoop):
        return loop.epoch, loop.max_epochs
    if isinstance(loop, IterBasedTrainLoop):
        return loop.iter, loop.max_iters
    return None


def is_complete(runner: AnyRunner) -> bool:
    """Whether nothing is left to train; never of an unknown loop."""
    count, last = progress_of(runner.train_loop) or (0, 1)
    return count >= last


def validation_follows(runner: AnyRunner) -> bool:
    """Whether training is where a validation comes next."""
    loop, progress = runner.train_loop, progress_of(runner.train_loop)
    if runner.val_loop is None or progress is None:
        return False
    loop._decide_current_val_interval()
    count, last = progress
    return count >= loop.val_begin and (count % loop.val_interval == 0 or count == last)
