"""Choose the hooks that a runner gets by default, as the key ``accelerator`` asks."""

from typing import Any, Dict, List, Optional, Sequence, Type

from mmengine.hooks import CheckpointHook, EmptyCacheHook, Hook, IterTimerHook, ProfilerHook

from mmdevplug.config.accelerator import AcceleratorOptions
from mmdevplug.distributed.process_group import device_context

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
    options: AcceleratorOptions, world_size: int, present: Sequence[Hook]
) -> List[Hook]:
    """The hooks that a runner is to have and has not.

    Args:
        options (AcceleratorOptions): Those of the config.
        world_size (int): Number of ranks.
        present (Sequence[Hook]): Those that it has.

    Returns:
        List[Hook]: To be registered.
    """
    several, memory, compilations = world_size > 1, options.memory, options.compilations
    context = device_context()
    lazy = context is not None and context.accelerator.lazy
    # Arguments by class, None for a hook that is not wanted.
    wanted: Dict[Type[Hook], Optional[Dict[str, Any]]] = {
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
        kind(**arguments)
        for kind, arguments in wanted.items()
        if arguments is not None and not any(isinstance(hook, kind) for hook in present)
    ]


REPLACED_BY: Dict[Type[Hook], Type[Hook]] = {
    CheckpointHook: SafeCheckpointHook,
    EmptyCacheHook: DeviceEmptyCacheHook,
    IterTimerHook: DeviceIterTimerHook,
    ProfilerHook: DeviceProfilerHook,
}


_BY_NAME = {kind.__name__: ours for kind, ours in REPLACED_BY.items()}


def replace_hook(hook: Any, safe_checkpoints: bool = True) -> Any:
    """Put our hook into the config of one of MMEngine's.

    Args:
        hook (Hook or dict): Hooks that are built already and those of others are kept.
        safe_checkpoints (bool): Whether ``CheckpointHook`` is replaced, too. Defaults to True.

    Returns:
        Hook or dict: What to register.
    """
    kind = hook.get('type') if isinstance(hook, dict) else None
    ours = _BY_NAME.get(kind) if isinstance(kind, str) else REPLACED_BY.get(kind)
    if ours is None or (ours is SafeCheckpointHook and not safe_checkpoints):
        return hook
    return dict(hook, type=ours)
