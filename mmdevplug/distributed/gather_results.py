"""Gather the results of metrics on rank 0 through the process group.

MMEngine does it through a folder, which hosts need not share and which may not be writable, or
with all results of all ranks on every rank.
"""

from typing import Dict, List, Optional, Sequence

from torch import distributed as torch_dist

from mmdevplug.accelerators import to_device
from mmdevplug.errors import SampleError, first_line
from mmdevplug.fault_tolerance.failure import enter_phase, known_to_all, raise_if_another_failed
from mmdevplug.fault_tolerance.failure_watch import GRACE_SECONDS

from .byte_exchange import exchange_bytes
from .wire import dumps, loads

#: Bytes of results that are sent at a time, approximately.
CHUNK_BYTES = 8 << 20


def gather_results(results: Sequence[object]) -> Optional[List[List[object]]]:
    """Gather lists of any objects on rank 0, in little memory besides the results themselves.

    Rank 0 takes a chunk from each rank by turns: one is on its way at a time, and no rank waits
    for all of another's. Objects of any class are made, as in MMEngine, because ranks of a job
    trust each other.

    Args:
        results (Sequence): The results of this rank.

    Returns:
        list or None: The results of each rank, tensors on the host; None on other ranks.

    Raises:
        SampleError: If a result cannot be pickled, on the rank that has it and on rank 0.
        RankFailedError: On rank 0 in place of it, in a job that reports failures.
    """
    enter_phase('gathering results')
    results = to_device(list(results), 'cpu')
    if torch_dist.get_rank() == 0:
        return [list(results), *_receive(range(1, torch_dist.get_world_size()))]
    sent, count = 0, 1
    while True:
        chunk = results[sent : sent + count]
        try:
            message = dumps((chunk, sent + count < len(results)), trusted=True)
        except Exception as error:  # whatever an object's own code raises
            refusal = _refusal(list(results), sent, error)
            exchange_bytes({0: dumps((str(refusal), False))}, [])
            raise refusal from error
        exchange_bytes({0: message}, [])
        sent += count
        if sent >= len(results):
            return None
        count = max(1, min(2 * count, count * CHUNK_BYTES // message.numel()))


def _refusal(results: List[object], begin: int, error: Exception) -> SampleError:
    """Name the first result, at ``begin`` or behind it, that cannot be pickled."""
    for index in range(begin, len(results)):
        try:
            dumps(results[index], trusted=True)
        except Exception as found:  # as above
            begin, error = index, found
            break
    return SampleError(
        f'rank {torch_dist.get_rank()}: result {begin} of {len(results)} that a metric keeps, of '
        f'type {type(results[begin]).__name__}, cannot be sent to rank 0, because it cannot be '
        f'pickled: {type(error).__name__}: {first_line(error)}. Keep numbers, arrays, tensors and '
        f"containers of them in the metric's results."
    )


def _receive(ranks: Sequence[int]) -> List[List[object]]:
    received: Dict[int, List[object]] = {rank: [] for rank in ranks}
    sending = list(ranks)
    while sending:
        for rank in list(sending):
            chunk, more = loads(exchange_bytes({}, [rank])[rank], trusted=True)
            if isinstance(chunk, str):
                raise_if_another_failed(wait=2 * GRACE_SECONDS)
                raise known_to_all(SampleError(chunk))
            received[rank] += chunk
            if not more:
                sending.remove(rank)
    return list(received.values())
