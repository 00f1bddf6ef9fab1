"""Choose the hooks that a runner gets by default, as the key ``accelerator`` asks."""

from typing import Any, Dict, List, Optional, Sequence, Type

from mmengine.hooks import CheckpointHook, EmptyCacheHook, Hook, IterTimerHook, ProfilerHook

from mmdevplug.accelerators import DeviceContext
from mmdevplug.config.accelerator import AcceleratorOptions

from .communication_hook import CommunicationHook
from .compilation_hook import CompilationHook
from .device_hook import DeviceHook
from .empty_cache_hook import DeviceEmptyCacheHook
from .iter_timer_hook import DeviceIterTimerHook
from .loss_check_hook import LossCheckHook
from .memory_hook import MemoryHook
from .mmcv_ops_hook import MMCVOpsHook
from .phase_hook import PhaseHook
from .preemption_hook import PreemptionHook
from .profiler_hook import DeviceProfilerHook
from .safe_checkpoint_hook import SafeCheckpointHook


def missing_hooks(
    options: AcceleratorOptions, context: DeviceContext, present: Sequence[Hook]
) -> List[Hook]:
    """Build the hooks that the options ask for and that are not present."""
    several, lazy = context.env.world_size > 1, context.accelerator.compilation.lazy
    memory, compilations = options.memory, options.compilations
    # Arguments by class, None for a hook that is turned off.
    arguments: Dict[Type[Hook], Optional[Dict[str, Any]]] = {
        DeviceHook: vars(options.hook),
        CommunicationHook: {} if several and options.monitor else None,
        CompilationHook: vars(compilations) if lazy and compilations is not None else None,
        MemoryHook: None if memory is None else vars(memory),
        LossCheckHook: {} if options.on_nan == 'stop' else None,
        MMCVOpsHook: {},
        PhaseHook: {} if several else None,
        PreemptionHook: {} if options.preemption else None,
    }
    return [
        kind(**values)
        for kind, values in arguments.items()
        if values is not None and not any(isinstance(hook, kind) for hook in present)
    ]


REPLACED_BY: Dict[Type[Hook], Type[Hook]] = {
    CheckpointHook: SafeCheckpointHook,
    EmptyCacheHook: DeviceEmptyCacheHook,
    IterTimerHook: DeviceIterTimerHook,
    ProfilerHook: DeviceProfilerHook,
}


def replace_hook(hook: Any, safe_checkpoints: bool = True) -> Any:
    """Replace the config of one of MMEngine's hooks by that of ours; built hooks stay."""
    kind = hook.get('type') if isinstance(hook, dict) else None
    ours = next((ours for old, ours in REPLACED_BY.items() if kind in (old, old.__name__)), None)
    if ours is None or (ours is SafeCheckpointHook and not safe_checkpoints):
        return hook
    return dict(hook, type=ours)
