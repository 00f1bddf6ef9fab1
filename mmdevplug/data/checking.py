"""Check before training that every rank has data, and as much as the others."""

import traceback
from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, Mapping, Optional

from mmengine.dataset import BaseDataset
from mmengine.dist import get_rank
from mmengine.runner import EpochBasedTrainLoop

from mmdevplug.distributed.waiting import decide_together
from mmdevplug.errors import SampleError
from mmdevplug.fault_tolerance.failure import raise_if_another_failed
from mmdevplug.fault_tolerance.failure_watch import GRACE_SECONDS

#: How many ranks a message lists.
MOST_NAMED = 8
#: Where a dataset finds its samples.
_SOURCES = ('ann_file', 'data_root', 'data_prefix', 'filter_cfg', '_indices')


@contextmanager
def explain_empty(config: Any) -> Iterator[None]:
    """Say what is empty where MMEngine's dataset fails because it has no samples.

    Args:
        config: The config of the data loader that is being built.

    Raises:
        SampleError: In place of NumPy's error, on the rank that has no samples.
    """
    try:
        yield
    except ValueError as error:
        dataset = _failed_to_pack(error)
        if dataset is None:
            raise
        raise SampleError(_no_samples(dataset, config)) from error


def _failed_to_pack(error: ValueError) -> Optional[BaseDataset]:
    """The dataset without samples that failed to pack them; None if it was something else."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for frame in reversed(frames):
        owner = frame.f_locals.get('self')
        if frame.f_code.co_name == '_serialize_data' and isinstance(owner, BaseDataset):
            return owner if len(owner.data_list) == 0 else None
    return None


def check_samples(loader: Any, config: Any) -> None:
    """Refuse a data loader whose dataset is known to be empty, which some samplers wait for.

    Args:
        loader (DataLoader): Of this rank.
        config: Its config.

    Raises:
        SampleError: If there is not a single sample.
    """
    dataset = getattr(loader, 'dataset', None)
    if length(dataset) == 0:
        raise SampleError(_no_samples(dataset, config))


def check_batches(loop: Any, key: str) -> None:
    """Refuse to train on a rank that gets no batch in an epoch.

    Loops that count iterations may have a sampler without end, whose length says nothing.

    Args:
        loop (BaseLoop): With its data loader.
        key (str): The data loader's key in the config.

    Raises:
        SampleError: If its length is known to be 0.
    """
    loader = getattr(loop, 'dataloader', None)
    if _by_epoch(loop) and length(loader) == 0:
        samples, size = length(loader.dataset), getattr(loader, 'batch_size', None)
        raise SampleError(
            f'rank {get_rank()}: {key} has no batch in an epoch: {describe(loader.dataset)} has '
            f'{samples} samples, of which this rank gets {_share(loader)}, with batch_size={size} '
            f'and drop_last={getattr(loader, "drop_last", None)}. Write a smaller '
            f'{key}.batch_size, {key}.drop_last=False, or start fewer ranks.'
        )


def compare_batches(loop: Any, key: str, phase: str) -> None:
    """Refuse epochs that have more batches on one rank than on another, before they hang.

    All ranks come here and wait for each other. Loops that count iterations begin their data anew
    and are left alone, and so are data loaders whose length is not known.

    Args:
        loop (BaseLoop): With its data loader.
        key (str): The data loader's key in the config.
        phase (str): What is being done, for messages of those who wait.

    Raises:
        SampleError: On the rank that has fewest.
        RankFailedError: On the others.
    """
    loader = getattr(loop, 'dataloader', None)
    mine = dict(
        batches=length(loader) if _by_epoch(loop) else None,
        samples=length(getattr(loader, 'dataset', None)),
        dataset=describe(getattr(loader, 'dataset', None)),
    )
    verdict = decide_together(phase, mine, _fewest)
    if verdict is not None:
        rank, told = verdict
        message = (
            f'{key} has not the same number of batches on all ranks: {told}. Every rank has to '
            f'see the same number, or the others wait for it in the middle of an epoch. Give all '
            f'ranks the same samples and the sampler DefaultSampler, which shares them out, or '
            f'train by iterations: train_cfg = dict(by_epoch=False, max_iters=...) with the '
            f'sampler InfiniteSampler.'
        )
        raise_on(rank, SampleError(message))


def _by_epoch(loop: Any) -> bool:
    return getattr(type(loop), 'run_epoch', None) is EpochBasedTrainLoop.run_epoch


def _fewest(ranks: List[Dict[str, Any]]) -> Optional[List[Any]]:
    """The rank with fewest batches and what to say; None if all have as many."""
    counts = [each['batches'] for each in ranks]
    if None in counts or len(set(counts)) == 1:
        return None
    order = sorted(range(len(ranks)), key=lambda rank: (counts[rank], rank))
    # The extremes: the ranks between them say little.
    named = order if len(order) <= MOST_NAMED else order[: MOST_NAMED - 1] + order[-1:]
    told = '; '.join(
        f'rank {rank} has {counts[rank]} ({ranks[rank]["samples"]} samples of '
        f'{ranks[rank]["dataset"]})'
        for rank in named
    )
    return [order[0], told]


def raise_on(rank: int, error: SampleError) -> None:
    """Raise an error on one rank, and on the others that this rank has failed."""
    if get_rank() != rank:
        raise_if_another_failed(wait=2 * GRACE_SECONDS)
    raise error


# words ------------------------------------------------------------------------------------------


def length(thing: Any) -> Optional[int]:
    """``len(thing)``, None where it is not known, such as for an ``IterableDataset``."""
    try:
        return len(thing)
    except (TypeError, NotImplementedError, AttributeError):
        return None


def describe(dataset: Any) -> str:
    """The type of a dataset and where its samples come from.

    Args:
        dataset (Dataset): Wrappers of other datasets name those too.
    """
    told = [f'{name}={value!r}' for name, value in _sources(dataset).items()]
    inner = getattr(dataset, 'datasets', None) or getattr(dataset, 'dataset', None)
    if inner is not None:
        each = inner if isinstance(inner, (list, tuple)) else [inner]
        told.append('of ' + ', '.join(describe(one) for one in each[:MOST_NAMED]))
    return f'{type(dataset).__name__}({", ".join(told)})'


def _sources(dataset: Any) -> Dict[str, Any]:
    found = {name.strip('_'): getattr(dataset, name, None) for name in _SOURCES}
    return {name: value for name, value in found.items() if _says_something(value)}


def _says_something(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_says_something(each) for each in value.values())
    return value not in (None, '', [])


def _no_samples(dataset: Any, config: Any) -> str:
    told = f'rank {get_rank()}: {describe(dataset)} has 0 samples'
    before = _before_filter(dataset)
    if before:
        told += f'; {before} were found, and its filter (filter_cfg, indices) left none'
        told += '. Write filter_cfg=None, or correct the annotations'
    else:
        told += (
            '. Look into these folders and files on the host of this rank: each rank reads its '
            "own, so data on a host's own disk has to be there on every host"
        )
    wanted = _type_of(config)
    if wanted and wanted != type(dataset).__name__:
        told += f'. It is a part of {wanted} in the config'
    return f'{told}.'


def _before_filter(dataset: Any) -> int:
    """How many samples there were before the dataset's own filter; 0 where it has none."""
    filters = getattr(dataset, 'filter_cfg', None) or getattr(dataset, '_indices', None)
    if not isinstance(dataset, BaseDataset) or filters is None:
        return 0
    return len(dataset.load_data_list())


def _type_of(config: Any) -> str:
    inner = config.get('dataset') if isinstance(config, Mapping) else None
    kind = inner.get('type') if isinstance(inner, Mapping) else None
    return getattr(kind, '__name__', None) or str(kind or '').rsplit('.', 1)[-1]


def _share(loader: Any) -> Optional[int]:
    return length(getattr(getattr(loader, 'batch_sampler', None), 'sampler', None))
