"""Choose the hooks that a runner gets by default, as the key ``accelerator`` asks."""

from typing import Any, List, Sequence

import mmengine.hooks
from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from mmdevplug.accelerators import DeviceContext
from mmdevplug.config.accelerator import AcceleratorOptions


def missing_hooks(
    options: AcceleratorOptions, context: DeviceContext, present: Sequence[Hook]
) -> List[Hook]:
    """Build the hooks that the options ask for and that are not present."""
    asked = dict(
        DeviceHook=True,
        CompilationHook=context.accelerator.compilation.lazy and options.compilations,
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


#: Hooks of MMEngine, and ours in their place.
REPLACED_BY = dict(
    CheckpointHook='SafeCheckpointHook',
    EmptyCacheHook='DeviceEmptyCacheHook',
    IterTimerHook='DeviceIterTimerHook',
    ProfilerHook='DeviceProfilerHook',
)


def replace_hook(hook: Any) -> Any:
    """Replace the config of one of MMEngine's hooks by that of ours; built hooks stay."""
    kind = hook.get('type') if isinstance(hook, dict) else None
    for name, ours in REPLACED_BY.items():
        if kind in (name, getattr(mmengine.hooks, name)):
            return dict(hook, type=HOOKS.get(ours))
    return hook
