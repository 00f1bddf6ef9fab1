"""Gather the results of metrics on rank 0 through the process group.

MMEngine does it through a folder, which hosts need not share and which may not be writable, or
with all results of all ranks on every rank.
"""

from typing import Any, Dict, List, Optional, Sequence

from torch import distributed as torch_dist

from mmdevplug.accelerators import to_device
from mmdevplug.errors import SampleError, first_line
from mmdevplug.fault_tolerance.failure import enter_phase

from .byte_exchange import exchange_bytes
from .wire import dumps, loads

#: Bytes of results that are sent at a time, approximately.
CHUNK_BYTES = 8 << 20


def gather_results(results: Sequence[Any]) -> Optional[List[List[Any]]]:
    """Gather lists of any objects on rank 0, in little memory besides the results themselves.

    Rank 0 takes a chunk from each rank by turns: one is on its way at a time, and no rank waits
    for all of another's. Objects of any class are made, as in MMEngine, because ranks of a job
    trust each other.

    Args:
        results (Sequence): The results of this rank.

    Returns:
        list or None: The results of each rank, tensors on the host; None on other ranks.

    Raises:
        SampleError: If a result cannot be pickled, on the rank that has it.
    """
    enter_phase('gathering results')
    results = to_device(list(results), 'cpu')
    if torch_dist.get_rank() == 0:
        return [results, *_receive(range(1, torch_dist.get_world_size()))]
    sent, count = 0, 1
    while True:
        chunk = results[sent : sent + count]
        try:
            message = dumps((chunk, sent + count < len(results)), trusted=True)
        except Exception as error:  # whatever an object's own code raises
            raise SampleError(
                f'rank {torch_dist.get_rank()}: results {sent} to {sent + len(chunk) - 1} of '
                f'{len(results)} that a metric keeps cannot be sent to rank 0: '
                f'{type(error).__name__}: {first_line(error)}. Keep numbers, arrays, tensors and '
                f"containers of them in the metric's results."
            ) from error
        exchange_bytes({0: message}, [])
        sent += count
        if sent >= len(results):
            return None
        count = max(1, min(2 * count, count * CHUNK_BYTES // message.numel()))


def _receive(ranks: Sequence[int]) -> List[List[Any]]:
    received: Dict[int, List[Any]] = {rank: [] for rank in ranks}
    sending = list(ranks)
    while sending:
        for rank in list(sending):
            chunk, more = loads(exchange_bytes({}, [rank])[rank], trusted=True)
            received[rank] += chunk
            if not more:
                sending.remove(rank)
    return list(received.values())
