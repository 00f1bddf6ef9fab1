"""The config key ``model_parallel``: its options, and the names that others have for them."""

from dataclasses import dataclass
from typing import Any, Dict, Mapping, Optional, Union

from mmdevplug.errors import ModelError, PlacementError

from .fields import FLAG, Options, choice, option, whole

#: Policies of :class:`mmdevplug.device_guard.DeviceGuard`.
GUARD_POLICIES = ('error', 'warn', 'move')

#: The dtype for each precision.
PRECISIONS = {None: None, 'fp32': 'float32', 'bf16': 'bfloat16', 'fp16': 'float16'}

#: Names that configs of LoRA trainings have for our options; a choice holds where it is True.
_RENAMED = {'device_map_strategy': 'strategy', 'use_model_parallel': 'enable'}
_CHOICES = {'use_balanced_device_map': 'balanced', 'use_dynamic_device_map': 'dynamic'}

_MICROBATCHES = whole(1).named('a whole number, 1 (no micro-batches) or more')


def read_num_microbatches(value: Any, key: str = 'model_parallel.num_microbatches') -> int:
    """Refuse what is no number of micro-batches."""
    if not _MICROBATCHES.holds(value):
        raise ModelError(
            f'model_parallel.num_microbatches={value!r}: expected {_MICROBATCHES.expected}.'
        )
    return value


@dataclass(frozen=True)
class ModelParallelOptions(Options):
    """How a model is to be spread over devices, parsed and checked by :meth:`from_config`.

    What depends on the devices that are there (``enable``, ``devices``, ``auto_rule``,
    ``max_memory``) is checked by
    :func:`mmdevplug.model_parallel.choose_strategy.resolve_strategy`, and what depends on the
    model by :func:`mmdevplug.model_parallel.plan`.
    """

    key, error = 'model_parallel', PlacementError

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
        check=FLAG,
    )
    exclude_cpu: bool = option(
        True,
        accepts='bool',
        meaning='Whether the host computes nothing; `False` gives it what devices cannot hold.',
        check=FLAG,
    )
    precision: Optional[str] = option(
        None,
        accepts="None, 'fp32', 'bf16', 'fp16'",
        meaning='Precision of frozen weights and of forward passes; weights that are trained stay '
        'as they are. `None` leaves everything as it is.',
        check=choice(*PRECISIONS),
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
        check=choice(None, *GUARD_POLICIES),
    )
    check_r_consistency: bool = option(
        False,
        accepts='bool',
        meaning='Whether to warn of LoRA adapters that differ in rank.',
        check=FLAG,
    )
    strict_r_check: bool = option(
        False,
        accepts='bool',
        meaning='Whether to refuse LoRA adapters that differ in rank.',
        check=FLAG,
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
        return cls.from_dict(_with_our_names(config))


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
