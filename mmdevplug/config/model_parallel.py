"""The config key ``model_parallel``: its options, and the names that others have for them."""

from dataclasses import dataclass
from typing import Any, Dict, Mapping, Optional, Union

from mmdevplug.errors import ModelError, PlacementError

from .fields import option, options_of, read_values

#: Policies of :class:`mmdevplug.device_guard.DeviceGuard`.
GUARD_POLICIES = ('error', 'warn', 'move')

#: Precisions of the weights that a plan counts with.
PRECISIONS = {
    None: None,
    'fp32': 'float32',
    'float32': 'float32',
    'bf16': 'bfloat16',
    'bfloat16': 'bfloat16',
    'fp16': 'float16',
    'float16': 'float16',
}

_RENAMED = {'device_map_strategy': 'strategy', 'use_model_parallel': 'enable'}
_CHOICES = {'use_balanced_device_map': 'balanced', 'use_dynamic_device_map': 'dynamic'}


# checks -----------------------------------------------------------------------------------------


def read_num_microbatches(value: Any, key: str = 'model_parallel.num_microbatches') -> int:
    """Refuse what is no number of micro-batches.

    Raises:
        ModelError: If it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(
            f'model_parallel.num_microbatches={value!r}: expected a whole number, 1 (no '
            f'micro-batches) or more.'
        )
    return value


def _read_guard(value: Any, key: str) -> Optional[str]:
    if value is not None and value not in GUARD_POLICIES:
        raise PlacementError(
            f'model_parallel.guard={value!r}: expected one of '
            f'{", ".join(map(repr, GUARD_POLICIES))}, or None for no guard.'
        )
    return value


def _read_precision(value: Any, key: str) -> Optional[str]:
    if value not in PRECISIONS:
        known = ', '.join(repr(name) for name in PRECISIONS if name)
        raise PlacementError(
            f'model_parallel.precision={value!r}: expected one of {known}, or None to leave '
            f'everything as it is.'
        )
    return value


def _read_bool(value: Any, key: str) -> bool:
    if not isinstance(value, bool):
        raise PlacementError(f'{key}={value!r}: expected True or False.')
    return value


# the key ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelParallelOptions:
    """How a model is to be spread over devices, parsed and checked by :meth:`from_config`.

    What depends on the devices that are there (``enable``, ``devices``, ``auto_rule``,
    ``max_memory``) is checked by
    :func:`mmdevplug.model_parallel.choose_strategy.resolve_strategy`, and what depends on the
    model by :func:`mmdevplug.model_parallel.plan`.
    """

    enable: Optional[bool] = option(
        None,
        accepts='None, bool',
        meaning='Whether the model is spread over several devices; `None` decides by the devices '
        'and the memory that training needs.',
    )
    devices: Any = option(
        None,
        accepts='None, int, str, list',
        meaning="How many devices each process takes, or their names, e.g. `'cuda:0-3'`; `None` "
        'for all.',
    )
    auto_rule: str = option(
        'memory',
        accepts="'memory', 'count'",
        meaning='What decides where `enable` is `None`: the memory that training needs, or the '
        'number of devices alone.',
    )
    strategy: str = option(
        'balanced',
        accepts="'balanced', 'dynamic', 'auto'",
        meaning="How the plan is made: the best contiguous split, HF accelerate's map if it is "
        "even enough, or accelerate's map.",
    )
    max_memory: Optional[Dict[Any, Any]] = option(
        None,
        accepts='None, dict',
        meaning="Memory that the plan may use on each device, e.g. `{'cuda:0': '10GB'}`; `None` "
        'for what the devices have.',
    )
    no_split: Any = option(
        None,
        accepts='None, list',
        meaning='Classes or modules that stay whole on one device; `None` finds them.',
    )
    balance_threshold: float = option(
        0.3,
        accepts='float',
        meaning="Imbalance up to which `'dynamic'` takes accelerate's map.",
    )
    force_balance: bool = option(
        True,
        accepts='bool',
        meaning='Whether a plan is refused in which a device gets nothing.',
        read=_read_bool,
    )
    exclude_cpu: bool = option(
        True,
        accepts='bool',
        meaning='Whether the host computes nothing; `False` gives it what devices cannot hold.',
        read=_read_bool,
    )
    precision: Optional[str] = option(
        None,
        accepts="None, 'fp32', 'bf16', 'fp16'",
        meaning='Precision of frozen weights and of forward passes; weights that are trained stay '
        'as they are. `None` leaves everything as it is.',
        read=_read_precision,
    )
    num_microbatches: int = option(
        1,
        accepts='int',
        meaning='Parts of a batch that follow each other through the devices.',
        read=read_num_microbatches,
    )
    guard: Optional[str] = option(
        'move',
        accepts="None, 'move', 'warn', 'error'",
        meaning='What `DeviceGuard` does about an operation that mixes devices: move operands, '
        'warn, or stop; `None` for no guard.',
        read=_read_guard,
    )
    check_r_consistency: bool = option(
        False,
        accepts='bool',
        meaning='Whether to warn of LoRA adapters that differ in rank.',
        read=_read_bool,
    )
    strict_r_check: bool = option(
        False,
        accepts='bool',
        meaning='Whether to refuse LoRA adapters that differ in rank.',
        read=_read_bool,
    )
    plan: Optional[Mapping[str, Any]] = option(
        None,
        accepts='None, dict',
        meaning='A plan to use as it is, as `mmdevplug plan --json` writes it.',
    )

    @classmethod
    def from_config(cls, config: Union[None, bool, Mapping[str, Any]]) -> 'ModelParallelOptions':
        """Parse and check the config key.

        Args:
            config (dict, bool or None): A dict of options, or ``enable`` alone.
                ``device_map_strategy`` is another name of ``strategy``;
                ``use_balanced_device_map=True`` and ``use_dynamic_device_map=True`` choose it too.

        Returns:
            ModelParallelOptions: ``enable=False`` where there is no such key.

        Raises:
            ModelError: If an option is unknown, contradicts another or has a value it cannot
                have.

        Examples:
            >>> ModelParallelOptions.from_config(dict(use_dynamic_device_map=True)).strategy
            'dynamic'
        """
        if config is None or isinstance(config, bool):
            return cls(enable=bool(config))
        if not isinstance(config, Mapping):
            raise PlacementError(
                f'model_parallel={config!r}: expected a dict such as dict(enable=True, '
                f'devices=2), or True or False.'
            )
        given = _with_our_names(config)
        ours = [one.name for one in options_of(cls)]
        unknown = sorted(set(given) - set(ours))
        if unknown:
            raise PlacementError(
                f'model_parallel has {", ".join(unknown)}, which it does not take. Correct the '
                f'name or remove it; known: {", ".join(sorted((*ours, *_RENAMED, *_CHOICES)))}.'
            )
        return cls(**read_values(cls, given, 'model_parallel'))


def _with_our_names(config: Mapping[str, Any]) -> Dict[str, Any]:
    options = {name: value for name, value in config.items() if name not in _CHOICES}
    for theirs, ours in _RENAMED.items():
        if theirs in options:
            value = options.pop(theirs)
            if options.setdefault(ours, value) != value:
                raise _contradiction(f'{theirs}={value!r}', f'{ours}={options[ours]!r}')
    chosen = [name for name in _CHOICES if config.get(name)]
    if len(chosen) > 1:
        raise _contradiction(*(f'{name}=True' for name in chosen))
    for name in chosen:
        if options.setdefault('strategy', _CHOICES[name]) != _CHOICES[name]:
            raise _contradiction(f'{name}=True', f'strategy={options["strategy"]!r}')
    return options


def _contradiction(*named: str) -> PlacementError:
    return PlacementError(
        f'model_parallel has {" and ".join(named)}, which contradict each other. Keep one.'
    )
