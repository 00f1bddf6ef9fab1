"""Choose the hooks that a runner gets by default, as the key ``accelerator`` asks."""

from inspect import signature
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Type

from mmengine.hooks import CheckpointHook, EmptyCacheHook, Hook, IterTimerHook, ProfilerHook

from mmdevplug.config.accelerator import RUNNER_OPTIONS
from mmdevplug.config.pad_to import read_pad_to
from mmdevplug.distributed.process_group import device_context
from mmdevplug.errors import DevPlugError
from mmdevplug.patches.mmcv_ops import check_mode

from .communication_hook import CommunicationHook
from .compilation_hook import CompilationHook
from .device_hook import DeviceHook
from .empty_cache_hook import DeviceEmptyCacheHook
from .iter_timer_hook import DeviceIterTimerHook
from .loss_check_hook import LossCheckHook, check_on_nan
from .memory_hook import MemoryHook
from .mmcv_ops_hook import MMCVOpsHook
from .phase_hook import PhaseHook
from .preemption_hook import PreemptionHook
from .profiler_hook import DeviceProfilerHook
from .safe_checkpoint_hook import SafeCheckpointHook


def split_options(accelerator: Mapping[str, Any]) -> Tuple[Dict[str, Any], Dict[str, Any]]:
    """Tell the arguments of the accelerator from those of the runner.

    Args:
        accelerator (Mapping): The config's key of that name.

    Returns:
        tuple: A dict for the accelerator, and one for the runner, with defaults.

    Raises:
        DevPlugError: If one of the runner's has an unknown value.
    """
    device = {key: value for key, value in accelerator.items() if key not in RUNNER_OPTIONS}
    runner = dict(RUNNER_OPTIONS)
    runner.update((key, accelerator[key]) for key in RUNNER_OPTIONS if key in accelerator)
    check_on_nan(runner['on_nan'])
    read_pad_to(runner['pad_to'])
    check_mode(runner['mmcv_ops'])
    for key, kind in _WITH_ARGUMENTS.items():
        _from_option(kind, key, runner[key])
    return device, runner


def missing_hooks(
    options: Mapping[str, Any], world_size: int, present: Sequence[Hook]
) -> List[Hook]:
    """The hooks that a runner is to have and has not.

    Args:
        options (Mapping): The runner's, from :func:`split_options`.
        world_size (int): Number of ranks.
        present (Sequence[Hook]): Those that it has.

    Returns:
        List[Hook]: To be registered.
    """
    several, memory, compiling = world_size > 1, options['memory'], options['compilations']
    context = device_context()
    lazy = context is not None and context.accelerator.lazy
    wanted = [
        (DeviceHook, True, lambda: DeviceHook(**options['hook'])),
        (CommunicationHook, several and options['monitor'], CommunicationHook),
        (
            CompilationHook,
            lazy and compiling is not False,
            lambda: _from_option(CompilationHook, 'compilations', compiling),
        ),
        (MemoryHook, memory is not False, lambda: _from_option(MemoryHook, 'memory', memory)),
        (LossCheckHook, options['on_nan'] == 'stop', LossCheckHook),
        (MMCVOpsHook, True, MMCVOpsHook),
        (PhaseHook, several, PhaseHook),
        (PreemptionHook, options['preemption'], PreemptionHook),
    ]
    return [
        build()
        for kind, is_wanted, build in wanted
        if is_wanted and not any(isinstance(hook, kind) for hook in present)
    ]


#: Hooks that the config turns on, off, or gives arguments, by the option's name.
_WITH_ARGUMENTS: Dict[str, Type[Hook]] = dict(compilations=CompilationHook, memory=MemoryHook)


def _from_option(kind: Type[Hook], key: str, option: Any) -> Optional[Hook]:
    if isinstance(option, bool):
        return kind() if option else None
    known = list(signature(kind).parameters)
    if isinstance(option, Mapping) and set(option) <= set(known):
        return kind(**option)
    raise DevPlugError(
        f'accelerator.{key}={option!r}: expected True, False, or a dict with some of '
        f'{", ".join(known)}.'
    )


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
