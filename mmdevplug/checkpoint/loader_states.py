"""Save and restore what data loaders keep from one pass to the next."""

from typing import Any, Dict

import torch

from mmdevplug.data.resumable_loader import resumable_batches


def loader_states(runner: Any) -> Dict[str, Dict]:
    """By loader, how many passes it has begun, and whether its persistent workers run."""
    states = {}
    for name, loader in _loaders(runner).items():
        batches = resumable_batches(loader)
        states[name] = dict(
            passes=0 if batches is None else batches.epoch + 1,
            workers_run=getattr(loader, '_iterator', None) is not None,
        )
    return states


def restore_loaders(runner: Any, states: Dict[str, Dict]) -> None:
    """Restore what :func:`loader_states` returned, before training."""
    for name, loader in _loaders(runner).items():
        if name not in states:
            continue
        batches = resumable_batches(loader)
        if batches is not None:
            batches.epoch = states[name]['passes'] - 1
        if states[name]['workers_run']:
            restart_workers_silently(loader)


def restart_workers_silently(loader: Any) -> None:
    """Prevent a data loader from drawing a random number when it starts persistent workers.

    It draws one when it starts them and none in later passes, so a resumed run would draw one
    more than the run that it continues.
    """
    persist = getattr(loader, 'persistent_workers', False) and loader.num_workers > 0
    if persist and loader._iterator is None:
        loader._iterator = _WorkersToStart()


class _WorkersToStart:
    """Stand for the iterator of a data loader whose persistent workers are yet to be started."""

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        """Replace itself by the real iterator; called when the loader begins its next pass."""
        generator, loader.generator = loader.generator, torch.Generator()
        try:
            loader._iterator = loader._get_iterator()
        finally:
            loader.generator = generator


def _loaders(runner: Any) -> Dict[str, Any]:
    loops = dict(train=runner.train_loop, val=runner.val_loop)
    return {name: loop.dataloader for name, loop in loops.items() if loop is not None}
