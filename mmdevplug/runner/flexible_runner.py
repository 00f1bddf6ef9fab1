"""Give MMEngine's FlexibleRunner the hooks, the log and the errors that DeviceRunner has.

FlexibleRunner has no interface through which a strategy can do this, so some of its methods are
replaced when a :class:`mmdevplug.runner.DeviceStrategy` starts. A runner with another strategy
gets MMEngine's own methods.
"""

from functools import wraps
from typing import Any, Callable, Dict, List, Optional

from mmengine.runner import FlexibleRunner
from torch import nn

from mmdevplug.checkpoint.fitting import repeat_beside
from mmdevplug.config.accelerator import to_dict
from mmdevplug.errors import DevPlugError
from mmdevplug.explanations.explain import explained, train_together
from mmdevplug.hooks.default_hooks import missing_hooks, replace_hook
from mmdevplug.patches.torch_load import trust_classes
from mmdevplug.utils.patched_symbols import FLEXIBLE_RUNNER
from mmdevplug.utils.patching import active_patches, patch_symbol

from .device_log_processor import device_log_processor


def patch_flexible_runner() -> None:
    """Replace methods of FlexibleRunner until ``restore_mmengine()``; once in a process."""
    if active_patches(FLEXIBLE_RUNNER):
        return
    for method in (_register_hooks, _register_hook, _build_log_processor, _train, _val, _test):
        name = method.__name__[1:]
        replacement = _for_our_strategies(vars(FlexibleRunner)[name], method)
        patch_symbol(FlexibleRunner, name, replacement)


def _for_our_strategies(original: Callable, method: Callable) -> Callable:
    @wraps(original)
    def replacement(runner: FlexibleRunner, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(runner.strategy, 'accelerator_options'):
            return original(runner, *args, **kwargs)
        return method(original, runner, *args, **kwargs)

    return replacement


def _register_hooks(
    original: Callable,
    runner: FlexibleRunner,
    default_hooks: Optional[Dict] = None,
    custom_hooks: Optional[List] = None,
) -> None:
    """Register hooks as MMEngine does, and ours where there are none of their kind."""
    _refuse_ignored_keys(runner)
    trust_classes(runner.cfg.get('checkpoint_classes') or [])
    original(runner, default_hooks, custom_hooks)
    options, context = runner.strategy.accelerator_options, runner.strategy.device_context
    for hook in missing_hooks(options, context, runner.hooks):
        runner.register_hook(hook)


def _register_hook(
    original: Callable, runner: FlexibleRunner, hook: Any, priority: Any = None
) -> None:
    """Register a hook, ours in the place of some of MMEngine's."""
    safe = runner.strategy.accelerator_options.safe_checkpoints
    original(runner, replace_hook(hook, safe), priority)


def _build_log_processor(original: Callable, runner: FlexibleRunner, log_processor: Any) -> Any:
    """Build the log processor, with the memory column of any accelerator."""
    return original(runner, device_log_processor(log_processor))


def _train(original: Callable, runner: FlexibleRunner) -> nn.Module:
    """Train; an error of one rank ends all of them with its name."""
    model = train_together(runner, lambda: original(runner))
    runner.strategy.misfit = None
    return model


def _val(original: Callable, runner: FlexibleRunner) -> dict:
    """Validate; see :func:`_train`."""
    with explained(runner, 'val'):
        return repeat_beside(original(runner), runner.strategy.misfit)


def _test(original: Callable, runner: FlexibleRunner) -> dict:
    """Test; see :func:`_train`."""
    with explained(runner, 'test'):
        return repeat_beside(original(runner), runner.strategy.misfit)


def _refuse_ignored_keys(runner: FlexibleRunner) -> None:
    """Refuse keys that DeviceRunner reads and FlexibleRunner hands to nobody."""
    strategy = runner.strategy
    options = to_dict(runner.cfg.get('accelerator'))
    chosen = {key: value for key, value in options.items() if value != 'auto'}
    if chosen and strategy.given_accelerator is None:
        raise DevPlugError(
            f'FlexibleRunner ignores the config key accelerator={options!r}. Expected it in the '
            f'strategy: strategy=dict(type={type(strategy).__name__!r}, accelerator=...).'
        )
    if runner.cfg.get('model_parallel') and not strategy.parallelism.wanted:
        raise DevPlugError(
            f'FlexibleRunner ignores the config key model_parallel='
            f'{runner.cfg.model_parallel!r}. Expected it in the strategy: '
            f"strategy=dict(type='ModelParallelStrategy', model_parallel=...)."
        )
