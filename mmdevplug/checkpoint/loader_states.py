"""Save and restore what data loaders keep from one pass to the next."""

from typing import Any, Dict

import torch

from mmdevplug.data.resumable_loader import resumable_batches


def loader_states(runner: Any) -> Dict[str, Dict]:
    """Collect what the loaders of training and validation remember.

    Args:
        runner (Runner): The runner.

    Returns:
        dict: For each loader how many passes it has begun, and whether its persistent workers run.
    """
    states = {}
    for name, loader in _loaders(runner).items():
        batches = resumable_batches(loader)
        states[name] = dict(
            passes=0 if batches is None else batches.epoch + 1,
            workers_run=getattr(loader, '_iterator', None) is not None,
        )
    return states


def restore_loaders(runner: Any, states: Dict[str, Dict]) -> None:
    """Let the loaders go on as those of the interrupted run would.

    Args:
        runner (Runner): The runner, before it trains.
        states (dict): What :func:`loader_states` returned.
    """
    for name, loader in _loaders(runner).items():
        state = states.get(name)
        if state is None:
            continue
        batches = resumable_batches(loader)
        if batches is not None:
            batches.epoch = state['passes'] - 1
        if state['workers_run']:
            restart_workers_silently(loader)


def restart_workers_silently(loader: Any) -> None:
    """Let a data loader draw no random number when it starts its persistent workers.

    It draws one when it starts them and none in later passes, so a resumed run would draw one
    more than the run that it continues.

    Args:
        loader (DataLoader): With or without workers that persist.
    """
    persist = getattr(loader, 'persistent_workers', False) and loader.num_workers > 0
    if persist and loader._iterator is None:
        loader._iterator = _WorkersToStart()


class _WorkersToStart:
    """Stand for the iterator of a data loader whose persistent workers are yet to be started."""

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        """Put the real iterator in this place: the loader is about to begin its next pass."""
        generator, loader.generator = loader.generator, torch.Generator()
        try:
            loader._iterator = loader._get_iterator()
        finally:
            loader.generator = generator


def _loaders(runner: Any) -> Dict[str, Any]:
    loops = dict(train=runner.train_loop, val=runner.val_loop)
    return {name: loop.dataloader for name, loop in loops.items() if loop is not None}
