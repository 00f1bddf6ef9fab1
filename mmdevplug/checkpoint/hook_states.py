"""Save and restore the state of hooks."""

from typing import Any, Dict, Iterator, Mapping, Optional, Tuple

from mmengine.hooks import EarlyStoppingHook, Hook, SyncBuffersHook

#: The attributes that MMEngine's own hooks change while training; those that are derived from the
#: runner or the message hub are not listed.
_ATTRIBUTES = {
    EarlyStoppingHook: ('wait_count', 'best_score'),
    SyncBuffersHook: ('called_in_train',),
}
#: mmdet's hooks that replace the pipeline of the training data, once, have this attribute.
_SWITCHED = '_has_switched'


def hook_states(runner: Any) -> Dict[str, Any]:
    """Collect the states of MMEngine's hooks, and of hooks with ``state_dict``, by hook."""
    return {
        name: _state(hook)
        for name, hook in _named(runner)
        if _keeps_state(hook) or hasattr(hook, _SWITCHED)
    }


def restore_hook_states(runner: Any, states: Mapping[str, Any]) -> None:
    """Restore what :func:`hook_states` collected; hooks without a saved state begin anew."""
    for name, hook in _named(runner):
        if name not in states or not _keeps_state(hook):
            continue
        if hasattr(hook, 'load_state_dict'):
            hook.load_state_dict(states[name])
        else:
            vars(hook).update(states[name])


def repeat_validation(
    runner: Any, checkpoint_hook: Hook, metrics: Optional[Mapping[str, Any]]
) -> None:
    """Call ``after_val_epoch`` of the hooks whose turn came after the checkpoint was saved."""
    hooks = runner.hooks
    for hook in hooks[hooks.index(checkpoint_hook) + 1 :] if metrics is not None else ():
        if _keeps_state(hook):
            hook.after_val_epoch(runner, metrics=dict(metrics))


def had_switched_pipeline(states: Mapping[str, Any]) -> bool:
    """Whether a hook had already replaced the pipeline of the training data."""
    return any(isinstance(state, dict) and state.get(_SWITCHED) for state in states.values())


def _keeps_state(hook: Hook) -> bool:
    own = hasattr(hook, 'state_dict') and hasattr(hook, 'load_state_dict')
    return own or isinstance(hook, tuple(_ATTRIBUTES))


def _state(hook: Hook) -> Any:
    if hasattr(hook, 'state_dict'):
        return hook.state_dict()
    names = [
        name for kind, names in _ATTRIBUTES.items() if isinstance(hook, kind) for name in names
    ]
    return {name: getattr(hook, name) for name in [*names, _SWITCHED] if hasattr(hook, name)}


def _named(runner: Any) -> Iterator[Tuple[str, Hook]]:
    """All hooks with names that are the same in every run of a config."""
    counts: Dict[str, int] = {}
    for hook in runner.hooks:
        name = type(hook).__name__
        counts[name] = counts.get(name, 0) + 1
        yield f'{name}/{counts[name]}', hook
