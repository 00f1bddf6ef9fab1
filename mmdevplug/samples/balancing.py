"""Give each rank an equal slice of the samples of all ranks."""

from typing import Any, List, Optional, Sequence, Tuple, Union

import msgpack

from mmdevplug.accelerators import to_device
from mmdevplug.distributed.byte_exchange import (
    DEFAULT_IN_FLIGHT,
    exchange_bytes,
    gather_bytes,
    swap_pieces,
    to_bytes,
    to_tensor,
)
from mmdevplug.distributed.process_group import group_device
from mmdevplug.errors import SampleError
from mmdevplug.fault_tolerance.failure import fail_together, known_to_all

from .comparing import Example
from .deserialize import deserialize, move_blocks, read_header, rebuild_samples
from .exchange import Device, Job, Options, begin, copy_own_samples
from .serialize import serialize
from .slices import Slice, holdings, parts_for, slices_of


def balance_samples(
    samples: Sequence[Any],
    per_rank: Optional[int] = None,
    group: Any = None,
    *,
    flatten: bool = False,
    same_structure: bool = True,
    allow_pickle: bool = False,
    device: Device = None,
    max_bytes_in_flight: int = DEFAULT_IN_FLIGHT,
) -> Union[List[Any], Tuple[List[Any], List[Any]]]:
    """Share the samples of all ranks out evenly.

    The pool is the samples of rank 0, then those of rank 1, and so on; each rank gets the next
    slice of it. Only samples that change rank travel, straight from the one rank to the other.

    Args:
        samples (Sequence): See :func:`gather_samples`.
        per_rank (int, optional): How many samples each rank gets. Defaults to None: all samples
            are shared out, and the numbers differ by at most one, lower ranks getting more.
        group (ProcessGroup, optional): Defaults to None: all ranks.
        flatten (bool): See :func:`gather_samples`.
        same_structure (bool): See :func:`gather_samples`.
        allow_pickle (bool): See :func:`gather_samples`.
        device (str or torch.device, optional): See :func:`gather_samples`.
        max_bytes_in_flight (int): See :func:`gather_samples`.

    Returns:
        list or Tuple[list, list]: This rank's slice; with ``per_rank`` also the samples that are
        left over, each on the rank that had it.

    Raises:
        SampleError: If samples cannot travel, differ in structure, or are too few.
        RankFailedError: If that is so on another rank, or another rank failed.

    Examples:
        >>> mine = balance_samples(valid)
        >>> mine, surplus = balance_samples(valid, per_rank=16)
    """
    problem = None
    if per_rank is not None and (type(per_rank) is not int or per_rank < 0):
        problem = f'per_rank={per_rank!r}: expected a number of samples, 0 or more, or None.'
    options = Options(flatten, same_structure, allow_pickle, device, max_bytes_in_flight)
    with fail_together('balance_samples()'):
        job = begin('balance_samples', samples, group, options, problem)
        counts, in_flight = [len(job.samples)], options.in_flight
        if job.world_size > 1:
            counts, in_flight = _count(job, per_rank)
        try:
            slices, held = slices_of(counts, per_rank), holdings(counts)
        except SampleError as error:
            raise known_to_all(error) from None
        mine = _swap(job, slices, held, in_flight)
        if per_rank is None:
            return mine
        left = slice(max(0, slices[-1].end - held[job.rank].begin), None)
        return mine, copy_own_samples(job.samples[left], job.device)


def _count(job: Job, per_rank: Optional[int]) -> Tuple[List[int], int]:
    """How many samples each rank has, and the smallest bound of bytes under way."""
    if job.error is not None:
        told: List[Any] = [str(job.error)]
    else:
        # Of the same structure but for the lengths of lists, which may be many.
        examples = {example.structure: example.sample for example in reversed(job.examples())}
        told = [len(job.samples), per_rank, list(examples.items())]
    message = to_tensor(msgpack.packb(told, unicode_errors='surrogatepass'))
    in_flight = DEFAULT_IN_FLIGHT if job.error is not None else job.options.in_flight
    gathered = gather_bytes(message, job.group, job.purpose, in_flight)
    answers = [
        msgpack.unpackb(to_bytes(part), unicode_errors='surrogatepass') for part in gathered.parts
    ]
    job.raise_together([answer[0] if len(answer) == 1 else None for answer in answers])
    wanted = [answer[1] for answer in answers]
    job.refuse_other_value('per_rank', wanted)
    job.refuse_differences(
        [
            Example.of(rank, sample, structure)
            for rank, (_, _, found) in enumerate(answers)
            for structure, sample in found
        ]
    )
    return [answer[0] for answer in answers], gathered.in_flight


def _swap(job: Job, slices: Sequence[Slice], held: Sequence[Slice], in_flight: int) -> List[Any]:
    """Send what others get, receive what is for this rank, and put it in the order of the pool."""
    outgoing = parts_for(held[job.rank], slices)
    kept = outgoing.pop(job.rank, Slice(0, 0))
    sources = [rank for rank in parts_for(slices[job.rank], held) if rank != job.rank]
    pieces = {job.rank: copy_own_samples(_part(job, kept, held), job.device)}
    if job.world_size > 1:
        begin = held[job.rank].begin
        chosen = [
            job.parts.select(part.begin - begin, part.end - begin) for part in outgoing.values()
        ]
        # One call, and so one execution, for what goes to all ranks.
        on_host = to_device([parts.blocks for parts in chosen], 'cpu')
        for parts, blocks in zip(chosen, on_host):
            parts.blocks = blocks
        packed = {rank: serialize(parts) for rank, parts in zip(outgoing, chosen)}
        data = {rank: message.data for rank, message in packed.items()}
        arrived = exchange_bytes(data, sources, job.group, in_flight)
        received = [
            deserialize(arrived[rank], read_header(arrived[rank]), job.options.allow_pickle)
            for rank in sources
        ]
        place = group_device(job.group)
        swap_pieces(
            {rank: [t.to(place) for t in message.large] for rank, message in packed.items()},
            {rank: received.to_fill() for rank, received in zip(sources, received)},
            job.group,
            in_flight,
        )
        placed = move_blocks(received, job.device)
        for rank, one, blocks in zip(sources, received, placed):
            pieces[rank] = rebuild_samples(one, blocks)
    return [sample for rank in sorted(pieces) for sample in pieces[rank]]


def _part(job: Job, part: Slice, held: Sequence[Slice]) -> List[Any]:
    begin = held[job.rank].begin
    return job.samples[part.begin - begin : part.end - begin] if part.size else []
