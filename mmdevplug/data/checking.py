"""Build the data loaders of a runner, and check before training that this rank has data."""

import os
import tempfile
import traceback
from contextlib import contextmanager
from typing import Callable, Iterator, Mapping, Optional, TypeVar

from mmengine.dataset import BaseDataset
from mmengine.dist import get_rank
from mmengine.runner import BaseLoop, EpochBasedTrainLoop, IterBasedTrainLoop
from mmengine.runner.loops import _InfiniteDataloaderIterator
from torch import multiprocessing
from torch.utils.data import DataLoader

from mmdevplug.errors import LaunchError, SampleError
from mmdevplug.utils.loops import length_of, loader_of

from .endless import take_for_endless
from .resumable_loader import make_resumable
from .worker_signals import keep_workers_from_signals

#: At most this number of ranks, or of inner datasets, is listed in a message.
MAX_LISTED = 8
Loader = TypeVar('Loader')
#: The attributes of a dataset that say where its samples come from.
_SOURCES = ('ann_file', 'data_root', 'data_prefix', 'filter_cfg', '_indices')
#: Bytes of the longest path of a socket, without those of Python's names below the folder.
LONGEST_TEMPORARY_FOLDER = 107 - len('/pymp-12345678/listener-12345678')


def build_loader(
    build: Callable[[], DataLoader], config: object, seed: Optional[int]
) -> DataLoader:
    """Build a data loader that can start in the middle of an epoch.

    Args:
        build (callable): Builds it as MMEngine does.
        config (dict or DataLoader): What it is built from.
        seed (int, optional): Of the run.
    """
    loader = build_nonempty(build, config)
    check_temporary_folder(loader)
    make_resumable(loader, seed, config)
    keep_workers_from_signals(loader)
    return loader


def build_nonempty(build: Callable[[], Loader], config: object) -> Loader:
    """Build a data loader; refuse an empty dataset, where MMEngine or a sampler would not say so.

    Raises:
        SampleError: On the rank that has no samples, and for data sets that MMEngine cannot wrap.
    """
    try:
        loader = build()
    except ValueError as error:
        # NumPy's error, where MMEngine packs no samples.
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        for frame in reversed(frames):
            dataset = frame.f_locals.get('self')
            if frame.f_code.co_name == '_serialize_data' and isinstance(dataset, BaseDataset):
                if len(dataset.data_list) == 0:
                    raise _no_samples(dataset, config) from error
                break
        raise
    except AttributeError as error:
        if "'full_init'" not in str(error):
            raise
        raise SampleError(
            f"MMEngine's wrappers of data sets, such as ConcatDataset, take those that inherit "
            f'mmengine.dataset.BaseDataset: {error}. Inherit that class.'
        ) from error
    dataset = getattr(loader, 'dataset', None)
    if length_of(dataset) == 0:
        raise _no_samples(dataset, config)
    return loader


def check_temporary_folder(loader: DataLoader) -> None:
    """Refuse workers that cannot pass batches on: the job would wait for them without end."""
    folder = tempfile.gettempdir()
    by_sockets = multiprocessing.get_sharing_strategy() == 'file_descriptor'
    length = len(os.fsencode(folder))
    if getattr(loader, 'num_workers', 0) and by_sockets and length > LONGEST_TEMPORARY_FOLDER:
        raise LaunchError(
            f'TMPDIR={folder!r} has {length} bytes, but sockets of the {loader.num_workers} '
            f'workers of a data loader lie there: expected at most {LONGEST_TEMPORARY_FOLDER}. '
            f'Name a shorter folder: export TMPDIR=/tmp. Or set num_workers=0.'
        )


def check_train_loop(loop: BaseLoop) -> None:
    """Refuse a loop without batches, and give that of a stream a length."""
    check_batches(loop)
    if isinstance(loop, IterBasedTrainLoop):
        take_for_endless(loop.dataloader)


def check_batches(loop: BaseLoop) -> None:
    """Refuse to train if this rank gets no batch in an epoch.

    Loops that count iterations may have an infinite sampler, so their length is not checked: see
    :func:`explain_no_batch`.
    """
    loader = loader_of(loop)
    if by_epoch(loop) and length_of(loader) == 0:
        raise _no_batch_error(loader)


@contextmanager
def explain_no_batch() -> Iterator[None]:
    """Replace the StopIteration of MMEngine's iterator by an error that names the data."""
    try:
        yield
    except StopIteration as stop:
        for frame, _ in traceback.walk_tb(stop.__traceback__):
            data = frame.f_locals.get('self')
            if isinstance(data, _InfiniteDataloaderIterator):
                loader = data._dataloader
                error = _ended_error(loader) if length_of(loader) else _no_batch_error(loader)
                # A RuntimeError caused by a StopIteration is one of Python's own to contextlib.
                raise error from None
        raise


def _no_batch_error(loader: DataLoader) -> SampleError:
    samples, size = length_of(loader.dataset), getattr(loader, 'batch_size', None)
    share = length_of(getattr(getattr(loader, 'batch_sampler', None), 'sampler', None))
    return SampleError(
        f'rank {get_rank()}: train_dataloader has no batch in an epoch: '
        f'{describe(loader.dataset)} has {samples} samples, of which this rank gets {share}, '
        f'with batch_size={size} and drop_last={getattr(loader, "drop_last", None)}. Set a '
        f'smaller train_dataloader.batch_size, train_dataloader.drop_last=False, or start '
        f'fewer ranks.'
    )


def _ended_error(loader: DataLoader) -> SampleError:
    sampler = getattr(loader.batch_sampler, 'sampler', loader.sampler)
    return SampleError(
        f'rank {get_rank()}: the sampler {type(sampler).__name__} of train_dataloader gives no '
        f'batch anymore, but {length_of(loader)} make an epoch. A sampler that never ends, as '
        f'InfiniteSampler, ends for all if another loop over the loader stops early, as that of a '
        f"hook may. Set train_dataloader.sampler=dict(type='DefaultSampler', shuffle=True), which "
        f'begins anew in each loop.'
    )


def by_epoch(loop: BaseLoop) -> bool:
    """Whether a loop trains by MMEngine's epochs, in which ranks need as many batches."""
    return getattr(type(loop), 'run_epoch', None) is EpochBasedTrainLoop.run_epoch


def describe(dataset: object) -> str:
    """Name the type of a dataset and where its samples come from, also those inside wrappers."""
    parts = []
    for name in _SOURCES:
        value = getattr(dataset, name, None)
        if not _is_empty(value):
            parts.append(f'{name.strip("_")}={value!r}')
    inner = getattr(dataset, 'datasets', None) or getattr(dataset, 'dataset', None)
    if inner is not None:
        each = inner if isinstance(inner, (list, tuple)) else [inner]
        parts.append('of ' + ', '.join(describe(one) for one in each[:MAX_LISTED]))
    return f'{type(dataset).__name__}({", ".join(parts)})'


def _is_empty(value: object) -> bool:
    if isinstance(value, Mapping):
        return all(_is_empty(each) for each in value.values())
    return value in (None, '', [])


def _no_samples(dataset: object, config: object) -> SampleError:
    message = f'rank {get_rank()}: {describe(dataset)} has 0 samples'
    unfiltered = _count_unfiltered(dataset)
    if unfiltered:
        message += (
            f'; {unfiltered} were found, and its filter (filter_cfg, indices) removed all. Set '
            f'filter_cfg=None, or correct the annotations'
        )
    else:
        message += (
            '. Look into these folders and files on the host of this rank: each rank reads its '
            "own, so data on a host's own disk has to be there on every host"
        )
    inner = config.get('dataset') if isinstance(config, Mapping) else None
    kind = inner.get('type') if isinstance(inner, Mapping) else None
    name = getattr(kind, '__name__', None) or str(kind or '').rsplit('.', 1)[-1]
    if name and name != type(dataset).__name__:
        message += f'. It is a part of {name} in the config'
    return SampleError(f'{message}.')


def _count_unfiltered(dataset: object) -> int:
    """Count the samples before the dataset's own filter; 0 where it has none."""
    filters = getattr(dataset, 'filter_cfg', None) or getattr(dataset, '_indices', None)
    if not isinstance(dataset, BaseDataset) or filters is None:
        return 0
    return len(dataset.load_data_list())
