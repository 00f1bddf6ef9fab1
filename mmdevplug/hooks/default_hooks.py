"""Choose the hooks that a runner gets by default, as the key ``accelerator`` asks."""

from typing import Any, List, Sequence, Union

from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from mmdevplug.accelerators import DeviceContext
from mmdevplug.config.accelerator import AcceleratorOptions
from mmdevplug.registry import replacement_of, with_ours
from mmdevplug.utils.annotations import AnyConfig
from mmdevplug.utils.logs import log_warning


def missing_hooks(
    options: AcceleratorOptions, context: DeviceContext, present: Sequence[Hook]
) -> List[Hook]:
    """Build the hooks that the options ask for and that are not present."""
    lazy = context.accelerator.compilation.lazy
    asked = dict(
        DeviceHook=True,
        LazyHook=lazy,
        ModesHook=True,
        ResultsHook=context.device.type != 'cpu',
        CompilationHook=lazy and options.compilations,
        MemoryHook=options.memory,
        PhaseHook=context.env.world_size > 1,
        PreemptionHook=options.preemption,
    )
    missing = []
    for name, is_asked in asked.items():
        if is_asked:
            kind = HOOKS.get(name)
            if not any(isinstance(hook, kind) for hook in present):
                missing.append(kind())
    return missing


def replace_hook(hook: Union[Hook, AnyConfig]) -> Union[Hook, AnyConfig]:
    """Replace the class in a hook's config by ours, or put ours under it.

    A hook that is built already stays, and what is lost with it is said.
    """
    if isinstance(hook, dict):
        return with_ours(HOOKS, hook)
    found = replacement_of(type(hook))
    if found is not None and not isinstance(hook, found[1]):
        name = type(hook).__name__
        ours: Any = found[1]
        log_warning(
            f'The hook {name} was built before it was registered, so {ours.__name__} does not '
            f'take its place: {ours.lost}. Register its config instead: dict(type={name!r}, ...).'
        )
    return hook
