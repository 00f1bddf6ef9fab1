"""Choose the hooks that a runner gets by default, as the key ``accelerator`` asks."""

from typing import List, Sequence, Union

from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from mmdevplug.accelerators import DeviceContext
from mmdevplug.config.accelerator import AcceleratorOptions
from mmdevplug.registry import warn_of_built, with_ours
from mmdevplug.utils.annotations import AnyConfig


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
    warn_of_built(hook, f'dict(type={type(hook).__name__!r}, ...)')
    return hook
