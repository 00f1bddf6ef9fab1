"""Hooks of MMEngine's that DeviceRunner replaces by ours, which take the same arguments."""

from typing import Any, Dict, Type

from mmengine.hooks import CheckpointHook, EmptyCacheHook, Hook, IterTimerHook, ProfilerHook

from .empty_cache_hook import DeviceEmptyCacheHook
from .iter_timer_hook import DeviceIterTimerHook
from .profiler_hook import DeviceProfilerHook
from .safe_checkpoint_hook import SafeCheckpointHook

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
