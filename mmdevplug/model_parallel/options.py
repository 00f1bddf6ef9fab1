"""The config key ``model_parallel``: its options, and the names that others have for them."""

from typing import Any, Dict, Mapping, NamedTuple, Optional, Union

from mmdevplug.device_guard import POLICIES
from mmdevplug.errors import PlacementError

from .microbatches import check_num_microbatches

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


class ModelParallelOptions(NamedTuple):
    """How a model is to be spread over devices.

    Attributes:
        enable (bool, optional): See :func:`mmdevplug.model_parallel.resolve.resolve_strategy`.
        devices (int, str or list, optional): See there.
        auto_rule (str): See there.
        strategy (str): ``'balanced'``, ``'dynamic'`` or ``'auto'``; see
            :func:`mmdevplug.model_parallel.plan`.
        max_memory (dict, optional): See there.
        no_split (list, optional): See there.
        balance_threshold (float): See there.
        force_balance (bool): See there.
        exclude_cpu (bool): See there.
        precision (str, optional): ``'fp32'``, ``'bf16'`` or ``'fp16'``: in which frozen weights
            are kept, and forward passes computed; what is trained stays as it is, for the
            optimizer's sake. Defaults to None: everything as the config has it.
        num_microbatches (int): See :func:`mmdevplug.model_parallel.microbatches.split_batches`.
        guard (str, optional): Policy of :class:`mmdevplug.device_guard.DeviceGuard`, None for no
            guard.
        check_r_consistency (bool): Whether to warn of adapters that differ in rank.
        strict_r_check (bool): Whether to refuse them.
        plan (dict, optional): A plan to use as it is, ``DevicePlan.to_dict()``'s.
    """

    enable: Optional[bool] = None
    devices: Any = None
    auto_rule: str = 'memory'
    strategy: str = 'balanced'
    max_memory: Optional[Dict[Any, Any]] = None
    no_split: Any = None
    balance_threshold: float = 0.3
    force_balance: bool = True
    exclude_cpu: bool = True
    precision: Optional[str] = None
    num_microbatches: int = 1
    guard: Optional[str] = 'move'
    check_r_consistency: bool = False
    strict_r_check: bool = False
    plan: Optional[Mapping[str, Any]] = None


def read_options(config: Union[None, bool, Mapping[str, Any]]) -> ModelParallelOptions:
    """Read and check the config key ``model_parallel``.

    Args:
        config (dict, bool or None): A dict of options, or ``enable`` alone.
            ``device_map_strategy`` is another name of ``strategy``;
            ``use_balanced_device_map=True`` and ``use_dynamic_device_map=True`` choose it too.

    Returns:
        ModelParallelOptions: ``enable=False`` where there is no such key.

    Raises:
        PlacementError: If an option is unknown, contradicts another or has a value it cannot have.

    Examples:
        >>> read_options(dict(use_dynamic_device_map=True)).strategy
        'dynamic'
    """
    if config is None or isinstance(config, bool):
        return ModelParallelOptions(enable=bool(config))
    if not isinstance(config, Mapping):
        raise PlacementError(
            f'model_parallel={config!r}: expected a dict such as dict(enable=True, devices=2), or '
            f'True or False.'
        )
    options = _with_our_names(config)
    unknown = sorted(set(options) - set(ModelParallelOptions._fields))
    if unknown:
        known = (*ModelParallelOptions._fields, *_RENAMED, *_CHOICES)
        raise PlacementError(
            f'model_parallel has {", ".join(unknown)}, which it does not take. Correct the name '
            f'or remove it; known: {", ".join(sorted(known))}.'
        )
    found = ModelParallelOptions(**options)
    _check(found)
    return found


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


def _check(options: ModelParallelOptions) -> None:
    check_num_microbatches(options.num_microbatches)
    if options.guard is not None and options.guard not in POLICIES:
        raise PlacementError(
            f'model_parallel.guard={options.guard!r}: expected one of '
            f'{", ".join(map(repr, POLICIES))}, or None for no guard.'
        )
    if options.precision not in PRECISIONS:
        known = ', '.join(repr(name) for name in PRECISIONS if name)
        raise PlacementError(
            f'model_parallel.precision={options.precision!r}: expected one of {known}, or None to '
            f'leave everything as it is.'
        )
    for name in ('force_balance', 'exclude_cpu', 'check_r_consistency', 'strict_r_check'):
        value = getattr(options, name)
        if not isinstance(value, bool):
            raise PlacementError(f'model_parallel.{name}={value!r}: expected True or False.')
