"""The config key ``model_parallel``: its options, and the names that others have for them."""

from dataclasses import dataclass
from typing import Any, Dict, Mapping, Optional, Sequence, Union

from mmdevplug.errors import PlacementError

from .fields import FLAG, Options, choice, flag, option, positive, refuse_unknown

#: Policies of :class:`mmdevplug.device_guard.DeviceGuard`.
GUARD_POLICIES = ('error', 'warn', 'move')

#: The dtype for each precision.
PRECISIONS = {
    None: None,
    'fp32': 'float32',
    'float32': 'float32',
    'bf16': 'bfloat16',
    'bfloat16': 'bfloat16',
    'fp16': 'float16',
    'float16': 'float16',
}

#: Names that configs of LoRA trainings have for our options; a choice holds where it is True.
_RENAMED = {'device_map_strategy': 'strategy', 'use_model_parallel': 'enable'}
_CHOICES = {'use_balanced_device_map': 'balanced', 'use_dynamic_device_map': 'dynamic'}


@dataclass(frozen=True)
class ModelParallelOptions(Options):
    """How a model is to be spread over devices, parsed and checked by :meth:`from_config`.

    What depends on the devices that are there (``enable``, ``devices``,
    ``max_memory``) is checked by
    :func:`mmdevplug.model_parallel.choose_devices.resolve_strategy`, and what depends on the
    model by :func:`mmdevplug.model_parallel.plan`.
    """

    key, error = 'model_parallel', PlacementError

    enable: Optional[bool] = option(
        None,
        'Spread the model over several devices; `None` decides by the devices and the memory of '
        'training.',
        accepts='None, bool',
    )
    devices: Union[None, int, str, Sequence[str]] = option(
        None,
        "Devices of each process: a number, or names, e.g. `'cuda:0-3'`; `None` for all.",
        accepts='None, int, str, list',
    )
    strategy: str = option(
        'balanced',
        "The plan: the best contiguous split, HF accelerate's map if it is even enough, or "
        "accelerate's map.",
        accepts="'balanced', 'dynamic', 'auto'",
    )
    max_memory: Optional[Mapping[Any, Union[int, str]]] = option(
        None,
        "Memory of each device for the plan, e.g. `{'cuda:0': '10GB'}`; `None` for the memory "
        'of the devices.',
        accepts='None, dict',
    )
    no_split: Optional[Sequence[str]] = option(
        None,
        'Classes or modules that stay whole on one device; `None` finds them.',
        accepts='None, list',
    )
    balance_threshold: float = option(
        0.3, 'Imbalance above which a plan is uneven.', check=positive(zero=True)
    )
    force_balance: Optional[bool] = option(
        None,
        'For an uneven plan: `None`: a warning, and an error if a device gets nothing; '
        '`True`: always an error; `False`: a device may be left out.',
        check=FLAG,
        read=lambda value, key: value if value is None or not FLAG.holds(value) else bool(value),
    )
    exclude_cpu: bool = flag(
        True, 'Whether the host computes nothing; `False` gives it what devices cannot hold.'
    )
    precision: Optional[str] = option(
        None,
        'Precision of frozen weights and of forward passes; weights that are trained stay '
        'as they are. `None` leaves everything as it is.',
        check=choice(*filter(None, PRECISIONS)),
    )
    guard: Optional[str] = option(
        'move',
        'For an operation that mixes devices, `DeviceGuard` moves operands, warns, or stops; '
        '`None` for no guard.',
        check=choice(*GUARD_POLICIES, None),
    )
    check_r_consistency: bool = flag(
        False, 'Whether to warn of LoRA adapters that differ in rank.'
    )
    strict_r_check: bool = flag(False, 'Whether to refuse LoRA adapters that differ in rank.')
    plan: Optional[Mapping[str, object]] = option(
        None, 'A plan to use as it is, as `mmdevplug plan --json` writes it.', accepts='None, dict'
    )

    @classmethod
    def from_config(
        cls, config: Union[None, bool, Mapping[str, object]]
    ) -> 'ModelParallelOptions':
        """Parse and check the config key: a dict of options, or ``enable`` alone.

        ``device_map_strategy`` is another name of ``strategy``; ``use_balanced_device_map=True``
        and ``use_dynamic_device_map=True`` choose it, too.

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
        refuse_unknown(config, [*cls.names(), *_RENAMED, *_CHOICES], cls.key, cls.error)
        return cls(**cls.read(_with_our_names(config)))


def _with_our_names(config: Mapping[str, object]) -> Dict[str, object]:
    found = dict(config)
    theirs = {name: (ours, found.pop(name)) for name, ours in _RENAMED.items() if name in found}
    for name, strategy in _CHOICES.items():
        if found.pop(name, False):
            theirs[name] = ('strategy', strategy)
    origins = {name: f'{name}={value!r}' for name, value in found.items()}
    for name, (ours, value) in theirs.items():
        written = f'{name}={config[name]!r}'
        if found.setdefault(ours, value) != value:
            raise PlacementError(
                f'model_parallel has {origins[ours]} and {written}, which contradict each other. '
                f'Keep one.'
            )
        origins.setdefault(ours, written)
    return found
