"""Compare what the ranks of a job read: the same data sets, and different samples of them.

Nothing is read from the loaders: samplers are built a second time, and the lists that a data set
holds stand for its samples.
"""

import pickle
import re
import zlib
from collections import deque
from functools import partial
from itertools import chain, islice, starmap, zip_longest
from operator import itemgetter
from typing import Any, Dict, Iterator, List, Mapping, Optional, Tuple

import numpy as np
from mmengine.dataset import BaseDataset, DefaultSampler
from mmengine.dist import get_rank
from mmengine.runner import IterBasedTrainLoop
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
)

from mmdevplug.accelerators.random_states import host_random_state, set_host_random_state
from mmdevplug.distributed.waiting import decide_together
from mmdevplug.errors import SampleError
from mmdevplug.fault_tolerance.failure import raise_if_another_failed
from mmdevplug.fault_tolerance.failure_watch import GRACE_SECONDS
from mmdevplug.model.placement import placement_of
from mmdevplug.utils.annotations import AnyLoop, AnyRunner
from mmdevplug.utils.logs import log_warning
from mmdevplug.utils.loops import length_of, loader_of, loaders_of

from .checking import MAX_LISTED, by_epoch, describe
from .endless import TRIED
from .order import build_batch_sampler, build_sampler, sampler_of

#: At most this number of indices of a sampler, and of entries of a list, is compared.
MOST_INDICES, MOST_ENTRIES = 500, 5000
_ADVICE = 'Set sampler=dict(type="DefaultSampler"), which divides them, for batch samplers, too.'
_LISTS = (list, tuple, deque, np.ndarray, Tensor)
#: Reading from these leaves them as they are.
_WITHOUT_STATE = (DefaultSampler, DistributedSampler, SequentialSampler)
#: What a rank knows of one of its loaders, by the names that :func:`_facts` gives.
Facts = Dict[str, Any]


def compare_data(runner: AnyRunner) -> None:
    """Warn, or refuse to go on, if ranks do not divide a data set between them.

    All ranks have to call it when the loops are built; it is one exchange for all their loaders.

    Raises:
        SampleError: On one rank, where samples would be validated or tested twice or not at all,
            or ranks would wait for each other in an epoch; the others raise RankFailedError.
    """
    mine, counted = {}, {}
    for kind in ('train', 'val', 'test'):
        configs, loop = getattr(runner, f'_{kind}_dataloader'), getattr(runner, f'_{kind}_loop')
        for index, loader in enumerate(loaders_of(loop)):
            several = isinstance(configs, (list, tuple)) and index < len(configs)
            config = configs[index] if several else configs
            name = f'{kind}_dataloader{f"[{index}]" if index else ""}'
            mine[name] = _facts(runner, loop, loader, config)
            mine[name]['metric'] = kind != 'train'
            if kind != 'train' and not placement_of(runner).whole:
                mine[name]['batches'] = length_of(loader)  # for each, ranks gather all weights
            counted[name] = partial(_count_batches, runner, loader, config)
    found, uneven = decide_together('comparing the data', mine, _judge)
    if uneven:
        # A length may be an estimate: ranks can agree on a number of batches when they read.
        for name, most in uneven.items():
            mine[name]['batches'] = counted[name](mine[name]['batches'], most)
        again = {name: mine[name] for name in uneven}
        found += decide_together('counting batches', again, _judge_counts)
    for name, message, culprit in found:
        if culprit is None:
            log_warning(f'{name}: {message}')
            continue
        if get_rank() != culprit:
            raise_if_another_failed(wait=2 * GRACE_SECONDS)
        raise SampleError(f'{name}: {message}')


class Stream:
    """Notice if ranks, or the workers of one, read the same samples of a set without a sampler."""

    def __init__(self, loader: DataLoader, name: str) -> None:
        self._loader, self._name, self._first = loader, name, 0

    def note(self, index: int, batch: object) -> None:
        """Look at the first two batches of this rank, which two workers have read."""
        if index < 2:
            digest = zlib.crc32(re.sub('0x[0-9a-f]+', '', repr(batch)).encode())
            if digest == self._first and self._loader.num_workers > 1:
                self._warn('two workers', 'torch.utils.data.get_worker_info()')
            self._first = self._first or digest

    def compare(self, phase: str) -> None:
        """Wait for all ranks, which all have to call it, and compare their first batches."""
        # 0: it had none.
        mine = self._first or -get_rank()
        same = decide_together(phase, mine, _equal_pair)
        if same is not None:
            self._warn(f'ranks {same[0]} and {same[1]}', 'mmengine.dist.get_rank()')

    def _warn(self, readers: str, names: str) -> None:
        log_warning(
            f'{self._name}_dataloader: {readers} have read the same first batch: '
            f'{type(self._loader.dataset).__name__} gives them the same samples, which count more '
            f'than once. Let its __iter__ leave out those of others, by {names}.'
        )


def stream_of(loop: AnyLoop, name: str) -> Optional[Stream]:
    """Return what looks at the first batches of a loop, None if a sampler divides its data."""
    loader = loader_of(loop)
    is_one = isinstance(getattr(loader, 'dataset', None), IterableDataset)
    return Stream(loader, name) if is_one else None


def _facts(runner: AnyRunner, loop: AnyLoop, loader: object, config: object) -> Facts:
    dataset, own = getattr(loader, 'dataset', None), sampler_of(loader)
    size = length_of(dataset)
    state = host_random_state()
    sampler = _build_sampler(runner, loader, config)
    if sampler is None and type(own) in _WITHOUT_STATE:
        sampler = own
    drawn = share = None
    batches = config.get('batch_sampler') if isinstance(config, Mapping) else None
    if size is not None and sampler is not None and isinstance(batches, Mapping):
        # Not many: it may read the data of each sample.
        own = build_batch_sampler(loader, config, sampler)
        most = min(size // runner.world_size, TRIED)
        some = list(islice(iter(own), most))
        drawn = list(map(str, islice(chain.from_iterable(some), most)))
        length = length_of(own)
        if some and length and not isinstance(loop, IterBasedTrainLoop):
            share = min(length * len(some[0]), size)
    elif size is not None and sampler is not None:
        # A sampler without an end gives each rank a share of a pass before it repeats samples.
        share = None if isinstance(loop, IterBasedTrainLoop) else length_of(sampler)
        most = size // runner.world_size if share is None else share
        drawn = list(map(str, islice(iter(sampler), min(most, MOST_INDICES))))
    set_host_random_state(state)
    return dict(
        size=size,
        lengths=_lengths(dataset),
        batch=getattr(loader, 'batch_size', None) or 1,
        batches=length_of(loader) if by_epoch(loop) else None,
        dataset=describe(dataset),
        sampler=type(own).__name__,
        drawn=drawn,
        share=share,
        lists=dict(_lists(dataset)),
    )


def _build_sampler(runner: AnyRunner, loader: object, config: object) -> Any:
    """Build the sampler of a loader a second time, with the seed of the first."""
    seed = None if runner._randomness_cfg.get('diff_rank_seed') else runner.seed
    return build_sampler(loader, config, getattr(sampler_of(loader), 'seed', seed))


def _lengths(dataset: object, depth: int = 3) -> object:
    """The length of a data set; a list of it and those of the data sets that it joins, if any."""
    inner, own = getattr(dataset, 'datasets', None), length_of(dataset)
    if not depth or not isinstance(inner, (list, tuple)):
        return own
    return [own, *(_lengths(each, depth - 1) for each in inner)]


def _lists(dataset: object, depth: int = 3) -> Iterator[Tuple[str, List[object]]]:
    """The lists of a data set: whether of all samples, digests of order and content, the first."""
    kind, held = type(dataset).__name__, getattr(dataset, '__dict__', {})
    for name, value in chain.from_iterable(starmap(_columns, held.items())):
        if depth and (name in ('dataset', 'datasets') or isinstance(value, Dataset)):
            for each in value if isinstance(value, (list, tuple)) else [value]:
                for inner, facts in _lists(each, depth - 1):
                    yield f'{kind}.{inner}', facts
            continue
        entries = _entries(value)
        first = entries[:3]
        if name == 'data_address' and isinstance(dataset, BaseDataset):
            ends = value[:MOST_ENTRIES].tolist()
            packed = memoryview(dataset.data_bytes)
            entries = [bytes(packed[a:b]) for a, b in zip([0, *ends], ends)]
            first = list(map(pickle.loads, entries[:3]))
        if name != 'data_bytes' and len(entries) > 1:
            data = (e if isinstance(e, bytes) else repr(e).encode() for e in entries)
            digests = list(map(zlib.crc32, data))
            whole = len(entries) == min(length_of(dataset) or 0, MOST_ENTRIES)
            order = zlib.crc32(repr(digests).encode())
            # Hosts may keep the same files in different folders.
            shown = re.sub(r'[^\'" ]*/', '', ', '.join(map(repr, first)))[:120]
            yield f'{kind}.{name}', [whole, order, sum(digests), shown]


def _columns(name: str, value: object) -> List[Tuple[str, Any]]:
    """An attribute, or the lists that it holds if it is a table or an index of annotations."""
    held = value if isinstance(value, dict) else getattr(value, '__dict__', {})
    if isinstance(value, Dataset) or callable(value):  # a transform
        return [(name, value)]
    lists = [(f'{name}.{key}', each) for key, each in held.items() if isinstance(each, _LISTS)]
    return lists or [(name, value)]


def _entries(value: object) -> List[Any]:
    """The first entries of a list, an array or a dict; [] where they cannot be compared."""
    if isinstance(value, (np.ndarray, Tensor)):
        some = value[:MOST_ENTRIES] if value.ndim else value
        return some.reshape(len(some), -1)[:, :16].tolist() if value.ndim and len(some) else []
    if isinstance(value, dict):  # has the same meaning in another order
        value = sorted(islice(value.items(), MOST_ENTRIES), key=repr)
    if not isinstance(value, (list, tuple, deque)):
        return []
    entries = list(islice(value, MOST_ENTRIES))
    large = any(isinstance(each, (np.ndarray, Tensor)) for each in entries)
    return [] if large or ' at 0x' in repr(entries[:3]) else entries


def _count_batches(
    runner: AnyRunner, loader: object, config: object, length: int, most: int
) -> int:
    """Count the batches of a pass of a repository's batch sampler, and at most one more than most.

    Any other loader gives as many batches as it says.
    """
    if not (isinstance(config, Mapping) and isinstance(config.get('batch_sampler'), Mapping)):
        return length
    state = host_random_state()
    sampler = _build_sampler(runner, loader, config)
    if sampler is not None:
        batches = build_batch_sampler(loader, config, sampler)
        length = sum(1 for _ in islice(iter(batches), most + 1))
    set_host_random_state(state)
    return length


def _judge(
    ranks: List[Dict[str, Facts]],
) -> Tuple[List[Tuple[str, str, Optional[int]]], Dict[str, int]]:
    """Find the problem of each loader, and the rank that refuses it; called on rank 0.

    Returns:
        tuple: The problems, and the loaders whose lengths differ, each with the largest one.
    """
    found: List[Tuple[str, str, Optional[int]]] = []
    uneven = {}
    for name in ranks[0]:
        facts = [each[name] for each in ranks if name in each]
        for message, certain in _judge_one(facts) if len(facts) == len(ranks) else ():
            if certain and facts[0]['metric']:
                found.append((name, f'{message} Metrics would be wrong.', 0))
            else:
                found.append((name, message, None))
        counts = list(map(itemgetter('batches'), facts))
        if None not in counts and len(set(counts)) > 1:
            uneven[name] = max(counts)
    return found, uneven


def _judge_counts(ranks: List[Dict[str, Facts]]) -> List[Tuple[str, str, int]]:
    """Find the loaders that give ranks different numbers of batches, and who refuses them."""
    found = []
    for name in ranks[0]:
        facts = [each[name] for each in ranks]
        counts = list(map(itemgetter('batches'), facts))
        if len(set(counts)) == 1:
            continue
        # The rank with the fewest and some with more.
        order = sorted(range(len(counts)), key=lambda rank: (counts[rank], rank))
        sources = [f' of {each["dataset"]}' for each in facts]
        shared = sources[0] if len(set(sources)) == 1 else ''
        listed = '; '.join(
            f'rank {rank} has {counts[rank]} ({facts[rank]["size"]} samples'
            f'{"" if shared else sources[rank]})'
            for rank in [*order[: MAX_LISTED - 1], *order[MAX_LISTED - 1 :][-1:]]
        )
        remedy = (
            'Give all ranks the same samples and the sampler DefaultSampler, which divides '
            'them, or train by iterations: train_cfg=dict(by_epoch=False, max_iters=...) with '
            'InfiniteSampler.'
        )
        if facts[0]['metric']:
            remedy = (
                'sharding gathers weights on all ranks for each batch. Use the sampler '
                'DefaultSampler with round_up=True, or evaluate without sharding.'
            )
        message = (
            f'ranks have different numbers of batches{shared}, and would wait in the middle of '
            f'an epoch: {listed}. {remedy}'
        )
        found.append((name, message, order[0]))
    return found


def _judge_one(facts: List[Facts]) -> Iterator[Tuple[str, bool]]:
    """Find the problem of a loader; say whether it is certain."""
    lists, sizes = facts[0]['lists'], list(map(itemgetter('size'), facts))
    shares = list(map(itemgetter('share'), facts))
    lengths = list(map(itemgetter('lengths'), facts))
    # Of the first list whose order differs from that of rank 0: the rank, the name, the entries.
    moved: Optional[Tuple[int, str, str]] = None
    changed: Optional[Tuple[int, str, str]] = None  # or whose entries do
    for rank, each in enumerate(facts):
        for name, (whole, order, content, shown) in lists.items():
            here = each['lists'].get(name, lists[name])
            if here[:3] == [whole, order, content]:
                continue
            if here[2] == content:
                moved = moved or (rank, name, here[3])
            elif whole and here[3] != shown:
                changed = changed or (rank, name, here[3])
    doubled, different = _describe_doubled(facts), moved or changed
    if doubled is not None:
        if not changed and len(set(sizes)) == 1:  # else each rank may have a share of its own
            yield f'{doubled}. {_ADVICE}', True
    elif different is not None:
        rank, name, shown = different
        same = 'the same samples in another order' if moved else 'other samples'
        yield (
            f'{name} lists {same} on rank {rank} ({shown}, ...) than on rank 0 '
            f'({lists[name][3]}, ...). Ranks divide indices, so some samples are read twice and '
            f'others never. Sort the list, and give all ranks the same files.',
            bool(moved) and lists[name][0],
        )
    elif facts[0]['metric'] and None not in shares and sum(shares) < max(sizes):
        yield f'all ranks together read {sum(shares)} of {max(sizes)} samples. {_ADVICE}', False
    elif lengths.count(lengths[0]) < len(lengths):
        certain = len(set(sizes)) == 1  # in all, of parts that differ
        yield f'ranks have data sets of different lengths: {lengths[:MAX_LISTED]}.', certain
    elif facts[0]['metric'] and _repeats(facts):
        message = f'{facts[0]["sampler"]} gives ranks some samples twice and others not at all'
        yield f'{message}. {_ADVICE}', True


def _repeats(facts: List[Facts]) -> bool:
    """Whether metrics keep two results of a sample: of all ranks by turns, as many as samples."""
    size, drawn = facts[0]['size'], list(map(itemgetter('drawn'), facts))
    if None in (size, *drawn) or list(map(len, drawn)) != list(map(itemgetter('share'), facts)):
        return False
    turns = list(islice(filter(None, chain.from_iterable(zip_longest(*drawn))), size))
    # Not of videos, whose samplers give more than an index.
    return len(facts) > 1 and all(map(str.isdigit, turns)) and len(set(turns)) < len(turns)


def _describe_doubled(facts: List[Facts]) -> Optional[str]:
    """Say which ranks read the same samples; None if they divide them, but for a filled batch."""
    first, ranks = facts[0], len(facts)
    size, sampler = first['size'], first['sampler']
    sets, whole, repeats = [], True, False
    for each in facts:
        if None in (size, each['drawn']) or size <= ranks:
            return None
        sets.append(set(each['drawn']))
        # Not more: a sampler may count frames of videos.
        whole = whole and each['share'] == size > first['batch']
        repeats = repeats or len(sets[-1]) < len(each['drawn'])
    pair = _equal_pair(list(map(sorted, sets)))
    if pair is not None:
        return f'{sampler} gives ranks {pair[0]} and {pair[1]} the same samples'
    shared = sum(map(len, sets)) - len(set().union(*sets))
    # Training may draw what it likes, such as rare classes more often.
    overlap = first['metric'] and not repeats and shared > ranks * first['batch']
    if whole or overlap:
        return f'{sampler} gives each rank samples of others, too, of {size} samples in all'
    return None


def _equal_pair(values: List[object]) -> Optional[Tuple[int, int]]:
    """The first two ranks that have the same value; None if all differ."""
    seen: Dict[str, int] = {}
    for rank, value in enumerate(values):
        if seen.setdefault(repr(value), rank) != rank:
            return seen[repr(value)], rank
    return None
