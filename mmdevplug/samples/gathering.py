"""Gather the samples of all ranks on every rank, or let all ranks refuse them together."""

from itertools import chain
from typing import Any, List, NamedTuple, Optional, Sequence, Tuple, Union

import torch
from torch import distributed as torch_dist

from mmdevplug.accelerators import rank_context, to_device
from mmdevplug.distributed.byte_exchange import gather_bytes
from mmdevplug.distributed.wire import CPU, dumps, loads
from mmdevplug.errors import RankFailedError, SampleError
from mmdevplug.fault_tolerance.failure import fail_together, known_to_all
from mmdevplug.utils.annotations import AnyGroup
from mmdevplug.utils.pytree import replace_parts, tensors_in

from .stacking import stack_samples
from .structures import Example, Structure, describe_difference, describe_samples, list_examples

Device = Union[str, torch.device, None]


class ExchangeOptions(NamedTuple):
    """Arguments of ``gather_samples`` and ``balance_samples``."""

    flatten: bool
    same_structure: bool
    allow_pickle: bool
    device: Device
    stacked: bool = False


class Job(NamedTuple):
    """This rank's part in an exchange."""

    name: str  # of the function that was called
    samples: List[object]  # of this rank
    structures: List[Structure]  # of these
    error: Optional[Exception]  # why this rank cannot take part
    group: AnyGroup
    rank: int  # in the group
    world_size: int  # of the group
    options: ExchangeOptions
    device: torch.device  # of the tensors of the result

    @property
    def call_tag(self) -> str:
        """The function, with the options that must be the same on all ranks."""
        short = self.name.partition('_')[0]
        _, same, pickled, _, stacked = self.options
        return f'{short}{"" if same else "*"}{"+" if pickled else ""}{"#" if stacked else ""}'

    def raise_together(self, errors: Sequence[Optional[str]]) -> None:
        """Raise this rank's error, or RankFailedError with the errors of other ranks."""
        if self.error is not None:
            raise known_to_all(self.error)
        failed = [f'rank {rank}: {text}' for rank, text in enumerate(errors) if text is not None]
        if failed:
            raise RankFailedError(f'{self.name}() stops because of {"; ".join(failed[:8])}')

    def refuse_differences(self, examples: Sequence[Example]) -> None:
        """Raise if samples differ in structure and must not; on all ranks, with all examples."""
        found = describe_difference(examples) if self.options.same_structure else None
        if found is not None:
            raise known_to_all(SampleError(f'{self.name}(): {found}'))


def gather_samples(
    samples: Sequence[object],
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
    Tensors are sent as raw bytes, the rest as plain values: received data cannot run code.
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
            makes of the pool, on the host before one copy to the device. Defaults to False.

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
    with fail_together('gather_samples()'):
        job = begin('gather_samples', samples, group, options, problem)
        if job.world_size == 1:
            return _result(job, copy_own_samples(job.samples, job.device))
        return _gather(job, max_bytes if job.error is None else None)


def _result(job: Job, pool: List[object]) -> object:
    if not job.options.stacked:
        return pool
    try:
        return stack_samples(pool, job.device)
    except SampleError as error:
        raise known_to_all(error) from None


def _gather(job: Job, max_bytes: Optional[int]) -> object:
    stacked, pickled = job.options.stacked, job.options.allow_pickle
    examples = list_examples(job.rank, job.structures)
    if job.error is None:
        data = dumps((examples, copy_own_samples(job.samples, CPU)), pickled)
    else:
        data = dumps(str(job.error))
    parts = gather_bytes(data, job.group, job.call_tag, max_bytes)
    del data
    received: List[object] = []
    for rank in range(job.world_size):
        # The buffer of a rank is freed before the samples of the next are copied out of theirs.
        part = parts.pop(0)
        if rank == job.rank and not (stacked or job.error):
            received.append((examples, copy_own_samples(job.samples, job.device)))
        else:
            received.append(loads(part, CPU if stacked else job.device, pickled))
    job.raise_together([each if isinstance(each, str) else None for each in received])
    found, pools = zip(*received)
    job.refuse_differences(list(chain.from_iterable(found)))
    return _result(job, list(chain.from_iterable(pools)))


def begin(
    name: str,
    samples: Sequence[object],
    group: AnyGroup,
    options: ExchangeOptions,
    problem: Optional[str] = None,
) -> Job:
    """Check the arguments of a function and describe this rank's samples.

    ``problem`` says what is wrong with another argument of the function. Errors that the other
    ranks do not know yet are kept in the job.
    """
    world_size, rank = _place_in(group)
    device = rank_context().device if options.device is None else torch.device(options.device)
    error: Optional[Exception] = None
    chosen: List[object] = []
    structures: List[Structure] = []
    try:
        _check(samples, problem)
        chosen = _flat(samples) if options.flatten else list(samples)
        structures = describe_samples(chosen, options.allow_pickle)
    except SampleError as caught:
        error = SampleError(f'{name}(): {caught}')
    job = Job(name, chosen, structures, error, group, rank, world_size, options, device)
    if world_size == 1:
        job.raise_together([])
        job.refuse_differences(list_examples(rank, structures))
    return job


def _place_in(group: AnyGroup) -> Tuple[int, int]:
    if not (torch_dist.is_available() and torch_dist.is_initialized()):
        if group is not None:
            raise SampleError(
                f'group={group!r}, but there is no process group. Leave it out, or call '
                f'mmdevplug.init_device() first.'
            )
        return 1, 0
    if group is not None and not isinstance(group, torch_dist.ProcessGroup):
        raise SampleError(
            f'group is a {type(group).__name__}; expected a ProcessGroup of '
            f'torch.distributed.new_group() that this rank is in, or None for all ranks. The pool '
            f'is what the function returns: there is no list to pass for it.'
        )
    return torch_dist.get_world_size(group), torch_dist.get_rank(group)


def _check(samples: object, problem: Optional[str]) -> None:
    if problem is not None:
        raise SampleError(problem)
    if not isinstance(samples, (list, tuple)):
        raise SampleError(
            f'samples is a {type(samples).__name__}; expected a list of samples, [] for none. A '
            f'batch is no list: take it apart first.'
        )


def _flat(samples: Sequence[object]) -> List[object]:
    flat: List[object] = []
    for sample in samples:
        flat.extend(_flat(sample) if isinstance(sample, list) else [sample])
    return flat


def copy_own_samples(samples: List[object], device: torch.device) -> List[object]:
    """This rank's samples as if received: on its device and without gradients."""
    tensors = tensors_in(samples)
    if any(tensor.requires_grad for tensor in tensors):
        samples = replace_parts(samples, lambda t: t.detach() if t.requires_grad else t)
    elif all(tensor.device == device for tensor in tensors):
        return samples
    return to_device(samples, device)
