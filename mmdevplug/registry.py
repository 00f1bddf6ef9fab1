"""Registries, and how the package's parts enter MMEngine's without being imported.

``import mmdevplug`` adds names alone, which keeps it free of torch and of every vendor package.
"""

from importlib import import_module
from typing import Any, Callable, Mapping

try:
    from mmengine.registry import Registry, build_from_cfg
except ModuleNotFoundError as error:
    if error.name != 'mmengine':
        raise
    from .utils.plain_registry import Registry, build_from_cfg

SCOPE = 'mmdevplug'

#: What is imported when it is named: the classes of these rooms, and their modules.
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
        MemoryHook='memory_hook',
        PhaseHook='phase_hook',
        PreemptionHook='preemption_hook',
        SafeCheckpointHook='safe_checkpoint_hook',
    ),
    optim=dict(
        DeviceAmpOptimWrapper='device_amp_optim_wrapper', DeviceOptimWrapper='device_optim_wrapper'
    ),
)


def _build_accelerator(cfg: Mapping[str, Any], registry: Registry) -> Any:
    """Build here, whatever ``default_scope`` the config has: MMEngine warns of any other."""
    return build_from_cfg(dict(cfg, _scope_=SCOPE), registry)


class _WithLazyNames(dict):
    """The classes of a registry, and ours, whose modules are imported when they are looked up.

    Registries of model repositories read this dict of their parent's, and import nothing for it.
    ``locations`` would not do for that; and all of MMEngine's registries without any share one
    list, whose being empty tells MMEngine to call ``register_all_modules`` of a repository.
    """

    def __init__(self, known: Mapping[str, Any], package: str, modules: Mapping[str, str]) -> None:
        super().__init__(known)
        self._package, self._locations = package, modules

    def __contains__(self, name: object) -> bool:
        known = super().__contains__
        if not known(name) and name in self._locations:
            import_module(f'{self._package}.{self._locations[name]}')  # type: ignore[index]
        return known(name)

    def __setitem__(self, name: str, value: Any) -> None:
        name in self  # noqa: B015  ours first, which a user's class of the same name replaces
        super().__setitem__(name, value)

    def __missing__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise KeyError(name)


def importing(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Make the ``__getattr__`` of a package whose modules are imported when they are needed."""

    def get(name: str) -> Any:
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
