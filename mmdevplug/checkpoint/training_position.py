"""Say where training is in the data, and begin a loop there."""

from typing import Any, NamedTuple

from mmengine.runner.loops import EpochBasedTrainLoop, _InfiniteDataloaderIterator
from torch.utils.data import DataLoader

from mmdevplug.utils.annotations import AnyRunner
from mmdevplug.utils.loops import length_of


class Position(NamedTuple):
    """How far training has come."""

    #: The pass over the data, as the sampler counts them.
    epoch: int
    #: How many batches of it this rank has trained on; -1 between two epochs.
    batch: int
    #: Whether the validation that follows has been done.
    validated: bool = False


class ReadStart(NamedTuple):
    """Where a loop over iterations began to read data."""

    iteration: int = 0
    epoch: int = 0
    batch: int = 0


def current_position(runner: AnyRunner, batch_idx: int) -> Position:
    """Where training is at the end of an iteration; ``batch_idx`` is the hook's argument."""
    loop = runner.train_loop
    iterator = getattr(loop, 'dataloader_iterator', None)
    if iterator is None:
        return Position(loop.epoch, batch_idx + 1)
    # After other numbers of ranks, a pass has another number of iterations.
    begun = getattr(iterator, 'begun', ReadStart())
    done = loop.iter + 1 - begun.iteration
    passes = iterator._epoch - begun.epoch
    # A sampler that never ends stays in the first pass.
    ended = passes * (length_of(loop.dataloader) or 0)  # a stream may have no length
    return Position(iterator._epoch, begun.batch + done - ended)


class ResumedIterator(_InfiniteDataloaderIterator):
    """An iterator over a loader that begins where training continues.

    MMEngine loads and drops the batches that were trained on; here ``steps`` only counts them.
    OneDL's MMEngine calls ``skip_iter`` instead.
    """

    begun = ReadStart()

    def __init__(self, loader: DataLoader, epoch: int, steps: int) -> None:
        self._dataloader, self._epoch, self._steps = loader, epoch, steps
        self._iterator: Any = None

    def skip_iter(self, num_iters: int) -> None:
        """Do nothing: the loader begins where training continues."""

    def __next__(self) -> Any:
        if self._steps > 0:
            self._steps -= 1
            return None
        if self._iterator is None:
            # Not earlier: it draws a random number, and workers begin to load.
            self._iterator = iter(self._dataloader)
        return super().__next__()


def number_batches_from(loop: EpochBasedTrainLoop, first: int) -> None:
    """Pass hooks the true index of each batch in the epoch that was interrupted."""
    run_iter, epoch = loop.run_iter, loop.epoch

    def run_numbered(idx: int, data_batch: object) -> None:
        run_iter(idx + first if loop.epoch == epoch else idx, data_batch)

    loop.run_iter = run_numbered
