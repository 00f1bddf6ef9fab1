"""Start an exchange of samples, and let all ranks refuse it together."""

from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Union

import torch
from torch import distributed as torch_dist

from mmdevplug.accelerators import to_device
from mmdevplug.distributed.rank_device import enter_rank_device
from mmdevplug.errors import RankFailedError, SampleError
from mmdevplug.fault_tolerance.failure import known_to_all
from mmdevplug.utils.annotations import AnyGroup
from mmdevplug.utils.pytree import replace_parts, tensors_in

from .comparing import Example, describe_difference
from .encode import Group, Structure, flatten_samples

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
    samples: List[Any]  # of this rank
    groups: List[Group]  # the same, flattened
    error: Optional[Exception]  # why this rank cannot take part
    group: Any  # None for all ranks
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


def begin(
    name: str,
    samples: Sequence[Any],
    group: AnyGroup,
    options: ExchangeOptions,
    problem: Optional[str] = None,
) -> Job:
    """Check the arguments of a function and flatten this rank's samples.

    ``problem`` says what is wrong with another argument of the function. Errors that the other
    ranks do not know yet are kept in the job.
    """
    world_size, rank = _place_in(group)
    device = enter_rank_device()[1] if options.device is None else torch.device(options.device)
    error: Optional[Exception] = None
    chosen: List[Any] = []
    groups: List[Group] = []
    try:
        _check(samples, problem)
        chosen = _flat(samples) if options.flatten else list(samples)
        groups = flatten_samples(chosen, options.allow_pickle)
    except SampleError as caught:
        error = SampleError(f'{name}(): {caught}')
    job = Job(name, chosen, groups, error, group, rank, world_size, options, device)
    if world_size == 1:
        job.raise_together([])
        job.refuse_differences(list_examples(rank, groups))
    return job


def _place_in(group: AnyGroup) -> Any:
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


def _flat(samples: Sequence[Any]) -> List[Any]:
    flat: List[Any] = []
    for sample in samples:
        flat.extend(_flat(sample) if isinstance(sample, list) else [sample])
    return flat


def list_examples(rank: int, groups: Sequence[Group]) -> List[Example]:
    """The first sample of each structure."""
    first: Dict[Structure, int] = {}
    for group in groups:
        first.setdefault(group.structure, group.rows[0])
    return [Example.of(rank, sample, structure) for structure, sample in first.items()]


def copy_own_samples(samples: List[Any], device: torch.device) -> List[Any]:
    """This rank's samples as if received: on its device and without gradients."""
    tensors = tensors_in(samples)
    if any(tensor.requires_grad for tensor in tensors):
        samples = replace_parts(samples, lambda t: t.detach() if t.requires_grad else t)
    elif all(tensor.device == device for tensor in tensors):
        return samples
    return to_device(samples, device)
