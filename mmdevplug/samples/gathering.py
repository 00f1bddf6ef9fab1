"""Gather the samples of all ranks on every rank."""

from contextlib import suppress
from itertools import chain
from typing import Any, List, Optional, Sequence, Union

from mmdevplug.accelerators import to_device
from mmdevplug.distributed.byte_exchange import gather_bytes
from mmdevplug.errors import SampleError
from mmdevplug.fault_tolerance.failure import fail_together, known_to_all
from mmdevplug.utils.annotations import AnyGroup

from .decode import decode, unflatten_samples
from .encode import encode
from .exchange import Device, ExchangeOptions, Job, begin, copy_own_samples, list_examples
from .stacking import are_alike, build_batch, stack_samples


def gather_samples(
    samples: Sequence[Any],
    group: AnyGroup = None,
    *,
    flatten: bool = False,
    same_structure: bool = True,
    allow_pickle: bool = False,
    device: Device = None,
    max_bytes: Optional[int] = None,
    stacked: bool = False,
) -> Union[List[Any], Any]:
    """Give every rank the samples of all ranks.

    A sample is a tensor, a NumPy array, a number, a string, bytes, None, or a ``dict``, ``list``,
    ``tuple``, named tuple, dataclass, or data element of MMEngine that consists of samples.
    Tensors are sent as raw bytes, the rest as typed plain values: received data cannot run code.
    Tensors arrive detached.

    Args:
        samples (Sequence): The samples of this rank, any number.
        group (ProcessGroup, optional): Defaults to None: all ranks.
        flatten (bool): Whether nested lists in ``samples`` are flattened. Defaults to False: a
            list is a sample.
        same_structure (bool): Whether to refuse samples that differ in structure. Numbers of all
            kinds count as one, None fits everything, lists may differ in length and tensors in
            shape. Defaults to True.
        allow_pickle (bool): Whether objects of other types are pickled, which lets every rank run
            code on every other. Defaults to False.
        device (str or torch.device, optional): The device of received tensors. Defaults to None:
            this rank's device.
        max_bytes (int, optional): The largest size of the pool. Defaults to None: the free memory
            of the host.
        stacked (bool): Whether to return a batch in place of a list: what :func:`stack_samples`
            makes of the pool, but without an object for each received sample where samples are
            all alike. Defaults to False.

    Returns:
        list or Any: The pool: the samples of rank 0, then those of rank 1, and so on. This rank's
        own are the objects that were passed, unless they had to be moved. With ``stacked`` one
        batch on the device.

    Raises:
        SampleError: If samples cannot be sent, differ in structure, are too many bytes, or cannot
            be stacked.
        RankFailedError: If that happens on another rank, or another rank failed.

    Examples:
        >>> pool = gather_samples([dict(answer='7', reward=torch.tensor(1.0))])
        >>> len(pool)  # in a job of 4 ranks
        4
        >>> gather_samples([dict(reward=torch.tensor(1.0))], stacked=True)['reward'].shape
        torch.Size([4])
    """
    problem = None
    if max_bytes is not None and (type(max_bytes) is not int or max_bytes < 1):
        problem = f'max_bytes={max_bytes!r}: expected a number of bytes above 0.'
    options = ExchangeOptions(flatten, same_structure, allow_pickle, device, stacked)
    with fail_together('gather_samples()', group):
        job = begin('gather_samples', samples, group, options, problem)
        if job.world_size == 1:
            return _result(job, copy_own_samples(job.samples, job.device))
        return _gather(job, max_bytes if job.error is None else None)


def _result(job: Job, pool: List[Any]) -> Union[List[Any], Any]:
    if not job.options.stacked:
        return pool
    try:
        return stack_samples(pool, job.device)
    except SampleError as error:
        raise known_to_all(error) from None


def _gather(job: Job, max_bytes: Optional[int]) -> Union[List[Any], Any]:
    data = encode(to_device(job.groups, 'cpu') if job.error is None else str(job.error))
    parts = gather_bytes(data, job.group, job.call_tag, max_bytes)
    del data
    received = list(map(decode, parts))
    parts.clear()
    job.raise_together([each if isinstance(each, str) else None for each in received])
    if job.options.stacked and are_alike(received):
        with suppress(SampleError):  # stack_samples() names the place
            return build_batch(received, job.device)
    examples = [list_examples(rank, groups) for rank, groups in enumerate(received)]
    job.refuse_differences(list(chain.from_iterable(examples)))
    received[job.rank] = []
    pool: List[Any] = []
    for rank in range(job.world_size):
        # The buffer of a rank is freed before the samples of the next are copied out of theirs.
        groups = received.pop(0)
        if rank == job.rank:
            pool += copy_own_samples(job.samples, job.device)
        else:
            pool += unflatten_samples(groups, job.device, job.options.allow_pickle)
    return _result(job, pool)
