"""Give each rank an equal slice of the samples of all ranks."""

from itertools import accumulate
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

from mmdevplug.distributed.byte_exchange import exchange_bytes, gather_bytes
from mmdevplug.distributed.wire import CPU, dumps, loads
from mmdevplug.errors import SampleError
from mmdevplug.fault_tolerance.failure import fail_together, known_to_all
from mmdevplug.utils.annotations import AnyGroup

from .gathering import Device, ExchangeOptions, Job, begin, copy_own_samples
from .structures import list_examples


def balance_samples(
    samples: Sequence[object],
    per_rank: Optional[int] = None,
    group: AnyGroup = None,
    *,
    flatten: bool = False,
    same_structure: bool = True,
    allow_pickle: bool = False,
    device: Device = None,
) -> Union[List[Any], Tuple[List[Any], List[Any]]]:
    """Distribute the samples of all ranks evenly.

    The pool is the samples of rank 0, then those of rank 1, and so on; each rank gets the next
    slice of it. Only samples that change rank are sent, directly from one rank to the other.

    Args:
        samples (Sequence): See :func:`gather_samples`.
        per_rank (int, optional): How many samples each rank gets. Defaults to None: all samples
            are distributed; the numbers differ by at most one, and lower ranks get more.
        group (ProcessGroup, optional): Defaults to None: all ranks.
        flatten, same_structure, allow_pickle, device: See :func:`gather_samples`.

    Returns:
        list or Tuple[list, list]: This rank's slice; with ``per_rank`` also the surplus samples
        of this rank.

    Raises:
        SampleError: If samples cannot be sent, differ in structure, or are too few.
        RankFailedError: If that happens on another rank, or another rank failed.

    Examples:
        >>> mine = balance_samples(valid)
        >>> mine, surplus = balance_samples(valid, per_rank=16)
    """
    problem = None
    if per_rank is not None and (type(per_rank) is not int or per_rank < 0):
        problem = f'per_rank={per_rank!r}: expected a number of samples, 0 or more, or None.'
    options = ExchangeOptions(flatten, same_structure, allow_pickle, device)
    with fail_together('balance_samples()'):
        job = begin('balance_samples', samples, group, options, problem)
        counts = [len(job.samples)] if job.world_size == 1 else _count(job, per_rank)
        try:
            slices, held = _slices(counts, per_rank), _consecutive(counts)
        except SampleError as error:
            raise known_to_all(error) from None
        mine = _swap(job, slices, held)
        if per_rank is None:
            return mine
        surplus = job.samples[max(0, slices[-1].stop - held[job.rank].start) :]
        return mine, copy_own_samples(surplus, job.device)


def _consecutive(counts: Sequence[int]) -> List[range]:
    """Ranges of these lengths, one after the other."""
    ends = list(accumulate(counts))
    return [range(end - count, end) for end, count in zip(ends, counts)]


def _slices(counts: Sequence[int], per_rank: Optional[int]) -> List[range]:
    """The slice of the pool that each rank gets, by the number of samples that each has."""
    world_size, total = len(counts), sum(counts)
    if per_rank is None:
        even, more = divmod(total, world_size)
        return _consecutive([even + (rank < more) for rank in range(world_size)])
    if total < per_rank * world_size:
        found = ', '.join(f'rank {rank} has {count}' for rank, count in enumerate(counts[:8]))
        raise SampleError(
            f'balance_samples(): per_rank={per_rank} on {world_size} ranks needs '
            f'{per_rank * world_size} samples, but the pool has {total}: {found}'
            f'{", ..." if world_size > 8 else ""}. Make more samples first, or leave per_rank out '
            f'to share out what there is.'
        )
    return _consecutive([per_rank] * world_size)


def _overlaps(mine: range, others: Sequence[range]) -> Dict[int, range]:
    """The parts of one range that lie in others, by their index, without empty ones."""
    found = {
        index: range(max(mine.start, other.start), min(mine.stop, other.stop))
        for index, other in enumerate(others)
    }
    return {index: part for index, part in found.items() if part}


def _count(job: Job, per_rank: Optional[int]) -> List[int]:
    """The number of samples of each rank."""
    own: object = str(job.error)
    if job.error is None:
        own = [len(job.samples), per_rank, list_examples(job.rank, job.structures)]
    gathered = gather_bytes(dumps(own), job.group, job.call_tag)
    answers = list(map(loads, gathered))
    job.raise_together([answer if isinstance(answer, str) else None for answer in answers])
    first = answers[0][1]
    for rank, (_, value, _) in enumerate(answers):
        if value != first:
            raise known_to_all(
                SampleError(
                    f'{job.name}(): per_rank={value!r} on rank {rank}, but {first!r} on rank 0; '
                    f'expected the same on all ranks.'
                )
            )
    job.refuse_differences([example for *_, found in answers for example in found])
    return [answer[0] for answer in answers]


def _swap(job: Job, slices: Sequence[range], held: Sequence[range]) -> List[object]:
    """Send samples to other ranks, receive this rank's, and order them as in the pool."""
    outgoing = _overlaps(held[job.rank], slices)
    begin = held[job.rank].start
    kept = outgoing.pop(job.rank, range(begin, begin))
    sources = [rank for rank in _overlaps(slices[job.rank], held) if rank != job.rank]
    own = job.samples[kept.start - begin : kept.stop - begin]
    pieces = {job.rank: copy_own_samples(own, job.device)}
    if job.world_size > 1:
        allow_pickle = job.options.allow_pickle
        # One call, and so one execution on a lazy device, for all ranks.
        chosen = copy_own_samples(
            [job.samples[part.start - begin : part.stop - begin] for part in outgoing.values()],
            CPU,
        )
        data = {rank: dumps(each, allow_pickle) for rank, each in zip(outgoing, chosen)}
        arrived = exchange_bytes(data, sources, job.group)
        for rank in sources:
            pieces[rank] = loads(arrived.pop(rank), job.device, allow_pickle)
    return [sample for rank in sorted(pieces) for sample in pieces[rank]]
