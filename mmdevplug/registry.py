"""Registries, and how the package's parts enter MMEngine's without being imported.

``import mmdevplug`` adds names alone, which keeps it free of torch and of every vendor package.
"""

from functools import lru_cache, wraps
from importlib import import_module
from typing import Any, Callable, Dict, Mapping, Optional, Tuple

try:
    from mmengine.registry import Registry, build_from_cfg
except ModuleNotFoundError as error:
    if error.name != 'mmengine':
        raise
    from .utils.plain_registry import Registry, build_from_cfg

from .errors import DevPlugError
from .utils.logs import log_warning

SCOPE = 'mmdevplug'

#: Classes of these rooms and their modules, which are imported when a class is looked up.
MODULES = dict(
    gradients=dict(
        DeviceDistributedDataParallel='wrapper',
        DeviceSeparateDistributedDataParallel='separate_wrapper',
    ),
    hooks=dict(
        CompilationHook='compilation_hook',
        DeviceEmptyCacheHook='empty_cache_hook',
        DeviceHook='device_hook',
        DeviceIterTimerHook='iter_timer_hook',
        DeviceProfilerHook='profiler_hook',
        LazyHook='lazy_hook',
        MemoryHook='memory_hook',
        ModesHook='modes_hook',
        PhaseHook='phase_hook',
        PreemptionHook='preemption_hook',
        ResultsHook='results_hook',
        SafeCheckpointHook='safe_checkpoint_hook',
    ),
    optim=dict(
        DeviceAmpOptimWrapper='device_amp_optim_wrapper', DeviceOptimWrapper='device_optim_wrapper'
    ),
)


def _build_accelerator(cfg: Mapping[str, object], registry: Registry) -> object:
    """Build here, whatever ``default_scope`` the config has: MMEngine warns of any other."""
    return build_from_cfg(dict(cfg, _scope_=SCOPE), registry)


class _WithLazyNames(dict):
    """The classes of a registry, and ours, whose modules are imported when they are looked up.

    Registries of model repositories read this dict of their parent's, and import nothing for it.
    ``locations`` would not do for that; and all of MMEngine's registries without any share one
    list, whose being empty tells MMEngine to call ``register_all_modules`` of a repository.
    """

    def __init__(
        self, known: Mapping[str, object], package: str, modules: Mapping[str, str]
    ) -> None:
        super().__init__(known)
        self._package, self._locations = package, modules

    def __contains__(self, name: object) -> bool:
        known = super().__contains__
        if not known(name) and name in self._locations:
            import_module(f'{self._package}.{self._locations[name]}')  # type: ignore[index]
        return known(name)

    def __setitem__(self, name: str, value: object) -> None:
        name in self  # noqa: B015  ours first, which a user's class of the same name replaces
        super().__setitem__(name, value)

    def __missing__(self, name: str) -> object:
        if name in self:
            return self[name]
        raise KeyError(name)


def importing(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Make the ``__getattr__`` of a package whose modules are imported when they are needed."""

    def get(name: str) -> object:
        if name not in modules:
            raise AttributeError(f'module {package!r} has no attribute {name!r}')
        return getattr(import_module(f'{package}.{modules[name]}'), name)

    return get


def register_lazily(registry: Registry, package: str, **modules: str) -> None:
    """Let a registry know names that modules of a package register when they are imported."""
    registry._module_dict = _WithLazyNames(registry._module_dict, package, modules)


ACCELERATORS = Registry('accelerator', build_func=_build_accelerator, scope=SCOPE)
register_lazily(
    ACCELERATORS,
    'mmdevplug.accelerators',
    **dict(cpu='cpu', cuda='cuda', gcu='gcu', tpu='tpu', xla='xla'),
    **dict.fromkeys(('npu', 'mlu', 'musa', 'sdaa', 'neuron', 'xpu', 'hpu', 'mps'), 'torch_native'),
)


# ours in place of theirs ------------------------------------------------------------------------

_OPTIM, _WRAPPERS = 'mmengine.optim.optimizer', 'mmengine.model.wrappers'
#: Classes of MMEngine and PyTorch, by where they are defined, and what takes their place.
REPLACED = {
    'mmengine.hooks.checkpoint_hook.CheckpointHook': 'hooks.SafeCheckpointHook',
    'mmengine.hooks.empty_cache_hook.EmptyCacheHook': 'hooks.DeviceEmptyCacheHook',
    'mmengine.hooks.iter_timer_hook.IterTimerHook': 'hooks.DeviceIterTimerHook',
    'mmengine.hooks.profiler_hook.ProfilerHook': 'hooks.DeviceProfilerHook',
    'mmengine.runner.log_processor.LogProcessor': 'runner.device_log_processor.DeviceLogProcessor',
    'mmengine.runner.loops.IterBasedTrainLoop': 'runner.device_iter_loop.DeviceIterBasedTrainLoop',
    'mmengine.runner.runner.Runner': 'runner.DeviceRunner',
    f'{_OPTIM}.optimizer_wrapper.OptimWrapper': 'optim.DeviceOptimWrapper',
    f'{_OPTIM}.amp_optimizer_wrapper.AmpOptimWrapper': 'optim.DeviceAmpOptimWrapper',
    f'{_WRAPPERS}.distributed.MMDistributedDataParallel': (
        'gradients.DeviceDistributedDataParallel'
    ),
    f'{_WRAPPERS}.seperate_distributed.MMSeparateDistributedDataParallel': (
        'gradients.DeviceSeparateDistributedDataParallel'
    ),
    'torch.nn.parallel.distributed.DistributedDataParallel': (
        'gradients.DeviceDistributedDataParallel'
    ),
}


def class_of(registry: Registry, named: object, scope: Optional[str] = None) -> Optional[type]:
    """Return the class that a config names: bare, with a scope, in full, or as the class itself.

    Args:
        registry (Registry): Where it is registered.
        named (str or type): The value of ``type``.
        scope (str, optional): ``_scope_`` of the config. Defaults to None: the current scope.

    Returns:
        type or None: None if there is no such class; MMEngine says so when it builds.
    """
    if not isinstance(named, str):
        return named if isinstance(named, type) else None
    with registry.switch_scope_and_registry(scope) as chosen:
        try:
            return chosen.get(named)
        except RuntimeError:  # MMEngine's for an unknown name
            return None


def replacement_of(kind: type) -> Optional[Tuple[type, type]]:
    """Return the class of MMEngine's or PyTorch's that a class is or inherits, and ours for it.

    Other subclasses that MMEngine has itself, such as ``ApexOptimWrapper``, are for one device.
    """
    for each in kind.__mro__:
        place = REPLACED.get(f'{each.__module__}.{each.__qualname__}')
        if place is not None and (each is kind or not kind.__module__.startswith('mmengine.')):
            room, _, name = place.rpartition('.')
            return each, getattr(import_module(f'mmdevplug.{room}'), name)
    return None


@lru_cache(maxsize=None)
def ours_for(kind: type) -> type:
    """Return the class to build in place of one of MMEngine's or PyTorch's, or of a subclass.

    A subclass of theirs becomes a class of its name that inherits from it and from ours, in this
    order: its ``super()`` calls reach our methods. Any other class is returned as it is.

    A constructor that does not reach ours leaves the subclass as it is, with a warning, if our
    class says in ``lost`` what that costs; else it is an error.

    Our class may have ``promises``, which map methods to what is lost if the subclass overrides
    them without calling ``super()``, or one of those that ``fulfilled_by`` names for it. A warning
    names such a method, once. Ours is called in any
    case where MMEngine's class lacks the method, so that nobody would write that call.
    """
    found = replacement_of(kind)
    if found is None or issubclass(kind, found[1]):
        return kind
    theirs, ours = found
    return ours if kind is theirs else _put_under(kind, theirs, ours)


def with_ours(registry: Registry, cfg: object, default: object = None) -> Any:
    """Replace the class that a config names by ours, or put ours under it; see :func:`ours_for`.

    ``default`` is the class if the config names none. Values that are no config stay as they are.
    """
    if not isinstance(cfg, dict):
        return cfg
    kind = class_of(registry, cfg.get('type', default), cfg.get('_scope_'))
    return cfg if kind is None else dict(cfg, type=ours_for(kind))


def warn_of_built(thing: object, config: str) -> None:
    """Say what is lost with an object of theirs that was built without ours, and what to write."""
    found = replacement_of(type(thing))
    if found is not None and not isinstance(thing, found[1]):
        ours: Any = found[1]
        log_warning(
            f'{type(thing).__name__} was not built by the runner, so {ours.__name__} does not '
            f'take its place: {ours.lost}. Give the runner its config instead: {config}.'
        )


def _put_under(kind: type, theirs: type, ours: type) -> type:
    noting: Dict[str, object] = {}
    checking: Dict[str, object] = {}
    for name, lost in {**getattr(ours, 'promises', {}), '__init__': None}.items():
        if getattr(kind, name, None) is not getattr(theirs, name, None):
            fulfilling = (name, *getattr(ours, 'fulfilled_by', {}).get(name, ()))
            noting.update((each, _note_call(getattr(ours, each))) for each in fulfilling)
            absent = lost is not None and name not in vars(theirs) and len(fulfilling) == 1
            checking[name] = _check_call(kind, ours, fulfilling, lost, absent)
    below = type(ours.__name__, (ours,), dict(noting, __module__=ours.__module__))
    return type(kind.__name__, (kind, below), dict(checking, __module__=kind.__module__))


def _note_call(method: Callable[..., object]) -> Callable[..., object]:
    @wraps(method)
    def noting(self: object, *args: object, **kwargs: object) -> object:
        vars(self).setdefault('_reached', set()).add(method.__name__)
        return method(self, *args, **kwargs)

    return noting


def _check_call(
    kind: type, ours: Any, fulfilling: Tuple[str, ...], lost: Optional[str], absent: bool
) -> Callable[..., object]:
    name = fulfilling[0]
    method = getattr(kind, name)

    @wraps(method)
    def checking(self: object, *args: object, **kwargs: object) -> object:
        vars(self).setdefault('_reached', set()).difference_update(fulfilling)
        result = method(self, *args, **kwargs)
        if not vars(self)['_reached'].isdisjoint(fulfilling):
            return result
        if absent:
            getattr(ours, name)(self, *args, **kwargs)
        elif lost is None and getattr(ours, 'lost', None) is not None:
            self.__class__ = kind  # MMEngine's would serve it
            _warn_once(
                f'{kind.__name__}: its constructor does not call super().__init__(), so '
                f'{ours.__name__} is not put under it: {ours.lost}. Call it.'
            )
        elif lost is None:
            raise DevPlugError(
                f'{kind.__name__}: its constructor does not reach that of {ours.__name__}, which '
                f'stands in for {ours.__mro__[1].__name__}. Expected super().__init__(...) in '
                f'place of the name of a class. Correct the constructor.'
            )
        else:
            _warn_once(
                f'{kind.__name__}.{name}() does not call super().{name}(): {lost}. Call it, or '
                f'inherit from {ours.__module__}.{ours.__name__}.'
            )
        return result

    return checking


@lru_cache(maxsize=None)
def _warn_once(text: str) -> None:
    log_warning(text)
