"""Check the arguments of a sampler where it is made."""

from typing import Any, Callable, NamedTuple, Optional

from torch import distributed as torch_dist

from mmdevplug.errors import SampleError

ON_SHORT = ('error', 'fewer', 'repeat')


class Settings(NamedTuple):
    """Numbers that must be the same on all ranks, and this rank's place.

    Attributes:
        target (int): Samples of a pool.
        per_group (int): Samples of a group.
        max_resamples (int): Rounds after the first.
        on_short (str): One of :data:`ON_SHORT`.
        world_size (int): Number of ranks that share a pool.
        rank (int): This one among them.
    """

    target: int
    per_group: int
    max_resamples: int
    on_short: str
    world_size: int = 1
    rank: int = 0

    @property
    def groups(self) -> int:
        """Groups of a pool."""
        return self.target // self.per_group

    @property
    def groups_per_rank(self) -> int:
        """Groups of a full pool that each rank gets."""
        return self.groups // self.world_size


def check_settings(
    target: int, per_group: int, max_resamples: int, on_short: str, group: Any = None
) -> Settings:
    """Check a sampler's arguments.

    Raises:
        SampleError: If one has a value that does not work.
    """
    _check_number('target', target, 1)
    _check_number('per_group', per_group, 1)
    _check_number('max_resamples', max_resamples, 0)
    if on_short not in ON_SHORT:
        raise SampleError(
            f"DynamicSampler: on_short={on_short!r}: expected 'error', 'fewer' or 'repeat'."
        )
    if target % per_group:
        raise SampleError(
            f'DynamicSampler: target={target} is no multiple of per_group={per_group}. Groups '
            f'stay whole: take {_multiple(target, per_group)} samples.'
        )
    world_size, rank = place_in(group)
    if (target // per_group) % world_size:
        whole = per_group * world_size
        raise SampleError(
            f'DynamicSampler: target={target} is {target // per_group} group(s) of '
            f'per_group={per_group}, which {world_size} ranks cannot share evenly. Take a target '
            f'that is a multiple of {whole}, such as {_multiple(target, whole)}.'
        )
    return Settings(target, per_group, max_resamples, on_short, world_size, rank)


def check_callable(name: str, value: Callable) -> None:
    """Check that a function is one.

    Raises:
        SampleError: If it is not.
    """
    if not callable(value):
        raise SampleError(f'DynamicSampler: {name}={value!r}: expected a function.')


def check_interval(interval: Optional[int]) -> int:
    """How often a pool is logged; 0 for never.

    Raises:
        SampleError: If it is no such number.
    """
    if interval is not None:
        _check_number('log_interval', interval, 0)
    return interval or 0


def place_in(group: Any) -> Any:
    """The number of ranks in a group, and this rank's number in it.

    Raises:
        SampleError: If this rank is not in it.
    """
    if not (torch_dist.is_available() and torch_dist.is_initialized()):
        return 1, 0
    rank = torch_dist.get_rank(group)
    if rank < 0:
        raise SampleError(
            f'DynamicSampler: rank {torch_dist.get_rank()} is not in the process group that it '
            f'was given. Make the sampler on the ranks of the group alone.'
        )
    return torch_dist.get_world_size(group), rank


def _check_number(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise SampleError(
            f'DynamicSampler: {name}={value!r}: expected a whole number, {least} or more.'
        )


def _multiple(number: int, of: int) -> int:
    return max(of, -(-number // of) * of)
