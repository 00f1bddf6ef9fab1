"""Gather the results of metrics on rank 0 through the process group.

MMEngine does it through a folder, which hosts need not share and which may not be writable, or
with all results of all ranks on every rank.
"""

import io
import os
import pickle
import struct
import tempfile
from typing import Any, Dict, Iterator, List, Optional, Sequence

import torch
from torch import Tensor, distributed as torch_dist

from mmdevplug.accelerators import to_device
from mmdevplug.errors import LaunchError, SampleError, first_line
from mmdevplug.fault_tolerance.failure import enter_phase, known_to_all, raise_if_another_failed
from mmdevplug.fault_tolerance.failure_watch import GRACE_SECONDS

from .byte_exchange import exchange_bytes, to_bytes
from .waiting import decide_together, run_on_main

#: A rank pickles results until they are this large, and sends them before it pickles the next.
CHUNK_BYTES = 8 << 20

#: The number of results in a chunk, and one of these.
_HEAD = struct.Struct('<QQ')
_MORE, _LAST, _FAILED = range(3)


def gather_results(results: Sequence[Any]) -> Optional[List[List[Any]]]:
    """Gather lists of any objects on rank 0, in little memory besides the results themselves.

    Rank 0 takes a chunk from each rank by turns: one is on its way at a time, and no rank waits
    for all of another's. Objects are pickled, as MMEngine does it, because ranks of a job trust
    each other.

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
        return [results, *_receive(range(1, torch_dist.get_world_size()))]
    try:
        for chunk in _chunks(results):
            exchange_bytes({0: chunk}, [])
    except SampleError as error:
        message = io.BytesIO(bytes(_HEAD.size) + str(error).encode())
        exchange_bytes({0: _finish(message, 0, _FAILED)}, [])
        raise
    return None


def _chunks(results: Sequence[Any]) -> Iterator[Tensor]:
    """Pickle results in chunks; objects that results of one chunk share are sent once."""
    count, last = 0, len(results) - 1
    file = io.BytesIO(bytes(_HEAD.size))
    pickler = _pickler(file)
    for index, result in enumerate(results):
        try:
            pickler.dump(result)
        except Exception as error:  # whatever the object's own code raises
            raise SampleError(
                f'rank {torch_dist.get_rank()}: result {index} of {len(results)} that a metric '
                f'keeps, of type {type(result).__name__}, cannot be sent to rank 0, because it '
                f'cannot be pickled: {type(error).__name__}: {first_line(error)}. Keep numbers, '
                f"arrays, tensors and containers of them in the metric's results."
            ) from error
        count += 1
        if file.tell() >= CHUNK_BYTES and index < last:
            yield _finish(file, count, _MORE)
            count, file = 0, io.BytesIO(bytes(_HEAD.size))
            pickler = _pickler(file)
    yield _finish(file, count, _LAST)


def _pickler(file: io.BytesIO) -> pickle.Pickler:
    file.seek(0, io.SEEK_END)
    return pickle.Pickler(file, protocol=5)


def _finish(file: io.BytesIO, count: int, kind: int) -> Tensor:
    buffer = file.getbuffer()
    _HEAD.pack_into(buffer, 0, count, kind)
    return torch.frombuffer(buffer, dtype=torch.uint8)


def _receive(ranks: Sequence[int]) -> List[List[Any]]:
    received: Dict[int, List[Any]] = {rank: [] for rank in ranks}
    sending = list(ranks)
    while sending:
        for rank in list(sending):
            data = memoryview(to_bytes(exchange_bytes({}, [rank])[rank]))
            count, kind = _HEAD.unpack_from(data)
            file = io.BytesIO(data[_HEAD.size :])
            if kind == _FAILED:
                raise_if_another_failed(wait=2 * GRACE_SECONDS)
                raise known_to_all(SampleError(file.read().decode()))
            unpickler = pickle.Unpickler(file)
            received[rank] += [unpickler.load() for _ in range(count)]
            if kind == _LAST:
                sending.remove(rank)
    return list(received.values())


def check_shared_folder(folder: str, key: str) -> None:
    """Refuse a folder that not all ranks see; all ranks have to call it.

    Raises:
        LaunchError: On rank 0, which names the ranks; RankFailedError on the others.
    """

    def refused(why: str) -> LaunchError:
        return LaunchError(
            f'{key}={folder!r}: {why}. Leave it out, so that results travel through the process '
            f'group, or name a folder that all ranks share.'
        )

    def create() -> str:
        try:
            os.makedirs(folder, exist_ok=True)
            number, path = tempfile.mkstemp(prefix='.seen-by-all-ranks-', dir=folder)
        except OSError as error:
            raise refused(f'rank 0 cannot write to it ({error})') from error
        os.close(number)
        return os.path.basename(path)

    path = os.path.join(folder, run_on_main(f'writing to {key}', create))

    def decide(seen: List[bool]) -> None:
        os.remove(path)
        missing = [str(rank) for rank, sees in enumerate(seen) if not sees]
        if missing:
            raise refused(f'rank {", ".join(missing)} cannot see what rank 0 writes there')

    decide_together(f'looking into {key}', os.path.exists(path), decide)
