"""Save and restore where data loaders and datasets are that know it themselves.

torchdata's ``StatefulDataLoader`` and its datasets have ``state_dict`` and ``load_state_dict``.
"""

from typing import Any, Callable, Optional

import torch
from torch.utils.data import DataLoader, IterableDataset


def stateful_part(loader: DataLoader) -> Optional[Any]:
    """Return what knows its place: the loader, or else its iterable dataset; None if neither does.

    With worker processes the dataset that is read is a copy in each of them.
    """
    dataset = getattr(loader, 'dataset', None)
    parts = [loader]
    if isinstance(dataset, IterableDataset) and getattr(loader, 'num_workers', 0) == 0:
        parts.append(dataset)
    return next((part for part in parts if _has_state(part)), None)


def _has_state(part: object) -> bool:
    return all(callable(getattr(part, name, None)) for name in ('state_dict', 'load_state_dict'))


def at_next_start(loader: DataLoader, start: Callable[[Any], Any]) -> bool:
    """Let a loader get its next iterator from a function, to which it is passed, once.

    False if it is none of PyTorch's.
    """
    if not isinstance(loader, DataLoader):
        return False

    before = vars(loader).get('_get_iterator')

    def start_once() -> Any:
        del vars(loader)['_get_iterator']
        if before is not None:
            vars(loader)['_get_iterator'] = before
        return start(loader)

    vars(loader)['_get_iterator'] = start_once
    return True


def start_silently(loader: DataLoader) -> Any:
    """Start an iterator without drawing a random number, as one that was started before."""
    generator, loader.generator = loader.generator, torch.Generator()
    try:
        return loader._get_iterator()
    finally:
        loader.generator = generator
