"""The options of ``train_cfg`` with ``type='DynamicSamplingTrainLoop'``."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Mapping, Optional, Union

from mmdevplug.errors import SampleError

from .fields import (
    FLAG,
    REQUIRED,
    TEXT,
    Check,
    Options,
    choice,
    flag,
    option,
    positive,
    read_dict,
    whole,
)

_COLLATE = Check(
    lambda value: (
        value in (None, 'stack', 'list')
        or callable(value)
        or (isinstance(value, Mapping) and 'type' in value)
    ),
    "None, 'stack', 'list', a function, or dict(type=...) with the name of a registered function",
    "None, 'stack', 'list', callable, dict",
)
_SECONDS = positive()
_TIMEOUT = Check(
    lambda value: value is None or isinstance(value, timedelta) or _SECONDS.holds(value),
    'seconds above 0, or None',
    'None, float',
)


@dataclass(frozen=True)
class SamplerOptions(Options):
    """What :class:`mmdevplug.dynamic_sampling.DynamicSampler` takes besides the size of a pool."""

    key, taken_by, error = 'train_cfg.sampler', 'DynamicSampler', SampleError

    same_structure: bool = flag(
        True, 'Whether the samples of all ranks must have the same keys, dtypes and shapes.'
    )
    allow_pickle: bool = flag(False, 'Whether samples may hold objects that only pickle can send.')
    timeout: Union[None, float, timedelta] = option(
        None,
        'Seconds that ranks wait for the slowest one in a round; `None` for the timeout '
        'of the process group.',
        check=_TIMEOUT,
    )
    log_interval: Optional[int] = option(
        10, 'Pools between two that rank 0 logs; 0 or `None` for no log.', check=whole(0).or_none()
    )
    progress: Optional[bool] = option(
        None,
        'Whether rank 0 shows a progress bar; `None` if the standard error is a terminal.',
        check=FLAG.or_none(),
    )
    collate: Any = option(
        None,
        'How samples become a batch: `None`: what is alike is stacked, the rest become lists; '
        "`'stack'`: all is stacked, or refused; `'list'`: a list of samples; or a function.",
        check=_COLLATE,
    )


_read_sampler = read_dict(SamplerOptions)


@dataclass(frozen=True)
class DynamicSamplingOptions(Options):
    """What all ranks draw until they stop, and with which methods of the model."""

    key, taken_by, error = 'train_cfg', 'DynamicSampler', SampleError

    target: int = option(
        REQUIRED,
        'Samples of a pool, of all ranks together: a multiple of `per_group` times the '
        'number of ranks.',
        check=whole(1),
    )
    per_group: int = option(1, 'Samples of a group, which stays whole.', check=whole(1))
    max_resamples: int = option(10, 'Rounds that may follow the first.', check=whole(0))
    on_short: str = option(
        'error',
        'What follows if too few groups are valid: an error, a smaller pool that ranks '
        'share evenly, or valid groups are repeated.',
        check=choice('error', 'fewer', 'repeat'),
    )
    generate: str = option(
        'generate_samples',
        "Method of the model that makes a list of samples of its data preprocessor's result.",
        check=TEXT,
    )
    is_valid: str = option(
        'is_valid_group',
        'Method of the model that decides on a group, which is in host memory.',
        check=TEXT,
    )
    sampler: SamplerOptions = option(
        {},
        'Further arguments of `DynamicSampler`.',
        accepts='None, dict',
        read=lambda value, key: _read_sampler({} if value is None else value, key),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target % self.per_group:
            raise SampleError(
                f'DynamicSampler: target={self.target} is no multiple of '
                f'per_group={self.per_group}. Groups stay whole: take '
                f'{_multiple(self.target, self.per_group)} samples.'
            )

    @property
    def groups(self) -> int:
        """Groups of a pool."""
        return self.target // self.per_group

    def check_ranks(self, world_size: int) -> None:
        """Refuse a pool that ranks cannot share evenly."""
        if self.groups % world_size:
            whole_pool = self.per_group * world_size
            raise SampleError(
                f'DynamicSampler: target={self.target} is {self.groups} group(s) of '
                f'per_group={self.per_group}, which {world_size} ranks cannot share evenly. Take '
                f'a target that is a multiple of {whole_pool}, such as '
                f'{_multiple(self.target, whole_pool)}.'
            )


def _multiple(value: int, of: int) -> int:
    return max(of, -(-value // of) * of)
