"""Choose the hooks that a runner gets by default, as the key ``accelerator`` asks."""

from typing import Any, Dict, List, Sequence, Type

from mmengine.hooks import CheckpointHook, EmptyCacheHook, Hook, IterTimerHook, ProfilerHook

from mmdevplug.accelerators import DeviceContext
from mmdevplug.config.accelerator import AcceleratorOptions

from .compilation_hook import CompilationHook
from .device_hook import DeviceHook
from .empty_cache_hook import DeviceEmptyCacheHook
from .iter_timer_hook import DeviceIterTimerHook
from .memory_hook import MemoryHook
from .phase_hook import PhaseHook
from .preemption_hook import PreemptionHook
from .profiler_hook import DeviceProfilerHook
from .safe_checkpoint_hook import SafeCheckpointHook


def missing_hooks(
    options: AcceleratorOptions, context: DeviceContext, present: Sequence[Hook]
) -> List[Hook]:
    """Build the hooks that the options ask for and that are not present."""
    several, lazy = context.env.world_size > 1, context.accelerator.compilation.lazy
    asked = {
        DeviceHook: True,
        CompilationHook: lazy and options.compilations,
        MemoryHook: options.memory,
        PhaseHook: several,
        PreemptionHook: options.preemption,
    }
    return [
        kind()
        for kind, is_asked in asked.items()
        if is_asked and not any(isinstance(hook, kind) for hook in present)
    ]


REPLACED_BY: Dict[Type[Hook], Type[Hook]] = {
    CheckpointHook: SafeCheckpointHook,
    EmptyCacheHook: DeviceEmptyCacheHook,
    IterTimerHook: DeviceIterTimerHook,
    ProfilerHook: DeviceProfilerHook,
}


def replace_hook(hook: Any) -> Any:
    """Replace the config of one of MMEngine's hooks by that of ours; built hooks stay."""
    kind = hook.get('type') if isinstance(hook, dict) else None
    ours = next((ours for old, ours in REPLACED_BY.items() if kind in (old, old.__name__)), None)
    return hook if ours is None else dict(hook, type=ours)
