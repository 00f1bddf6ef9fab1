"""Save and restore the states of hooks, data loaders, and buffers that differ between ranks."""

import hashlib
import io
from typing import Any, Dict, Iterator, List, Mapping, Optional, Tuple

import torch
from mmengine.dist import get_world_size
from mmengine.hooks import EarlyStoppingHook, Hook, SyncBuffersHook
from torch import Tensor, nn
from torch.utils.data import DataLoader

from mmdevplug.accelerators import Accelerator
from mmdevplug.accelerators.backend import group_device
from mmdevplug.data.resumable_loader import resumable_batches
from mmdevplug.data.stateful import start_silently
from mmdevplug.distributed.byte_exchange import (
    all_gather,
    gather_bytes,
    gather_json,
    to_bytes,
    to_tensor,
)
from mmdevplug.patches.torch_load import safe_loading
from mmdevplug.utils.annotations import AnyRunner
from mmdevplug.utils.loops import loader_of, loaders_of
from mmdevplug.utils.torch_compat import view_as_dtype

from .writing import save_with_warning

#: The attributes that MMEngine's own hooks change while training; those that are derived from the
#: runner or the message hub are not listed.
_ATTRIBUTES = {
    EarlyStoppingHook: ('wait_count', 'best_score'),
    SyncBuffersHook: ('called_in_train',),
}
#: mmdet's hooks that replace the pipeline of the training data, once, have this attribute.
_SWITCHED = '_has_switched'


def hook_states(runner: AnyRunner) -> Dict[str, Any]:
    """Collect the states of MMEngine's hooks, and of hooks with ``state_dict``, by hook."""
    return {
        name: _state(hook)
        for name, hook in named_hooks(runner)
        if keeps_state(hook) or switches_pipeline(hook)
    }


def restore_hook_states(runner: AnyRunner, states: Mapping[str, Any]) -> None:
    """Restore what :func:`hook_states` collected; hooks without a saved state begin anew."""
    for name, hook in named_hooks(runner):
        if name not in states or not keeps_state(hook):
            continue
        if hasattr(hook, 'load_state_dict'):
            hook.load_state_dict(states[name])
        else:
            vars(hook).update(states[name])


def stateful_hooks(runner: AnyRunner) -> List[str]:
    """Name the hooks that restore a state."""
    return [name for name, hook in named_hooks(runner) if keeps_state(hook)]


def repeat_validation(
    runner: AnyRunner, checkpoint_hook: Hook, metrics: Optional[Mapping[str, Any]]
) -> None:
    """Call ``after_val_epoch`` of the hooks whose turn came after the checkpoint was saved."""
    hooks = runner.hooks
    for hook in hooks[hooks.index(checkpoint_hook) + 1 :] if metrics is not None else ():
        if keeps_state(hook):
            hook.after_val_epoch(runner, metrics=dict(metrics))


def had_switched_pipeline(states: Mapping[str, Any]) -> bool:
    """Whether a hook had already replaced the pipeline of the training data."""
    return any(isinstance(state, dict) and state.get(_SWITCHED) for state in states.values())


def switches_pipeline(hook: Hook) -> bool:
    """Whether a hook replaces the pipeline of the training data, which a resumed run needs too."""
    return hasattr(hook, _SWITCHED)


def keeps_state(hook: Hook) -> bool:
    """Whether the state of a hook is saved by its methods, or is that of MMEngine's own hooks."""
    own = hasattr(hook, 'state_dict') and hasattr(hook, 'load_state_dict')
    return own or isinstance(hook, tuple(_ATTRIBUTES))


def _state(hook: Hook) -> Any:
    if hasattr(hook, 'state_dict'):
        return hook.state_dict()
    names = [
        name for kind, names in _ATTRIBUTES.items() if isinstance(hook, kind) for name in names
    ]
    return {name: getattr(hook, name) for name in [*names, _SWITCHED] if hasattr(hook, name)}


def named_hooks(runner: AnyRunner) -> Iterator[Tuple[str, Hook]]:
    """All hooks with names that are the same in every run of a config."""
    counts: Dict[str, int] = {}
    for hook in runner.hooks:
        name = type(hook).__name__
        counts[name] = counts.get(name, 0) + 1
        yield f'{name}/{counts[name]}', hook


def gather_packed(value: object) -> List[Tensor]:
    """Gather values that ``weights_only`` loads from all ranks, as the bytes of files.

    Whoever writes them into a checkpoint need not know how to write deques.
    """
    stream = io.BytesIO()
    save_with_warning(value, stream, 'a state of this rank')
    data = to_tensor(stream.getvalue())
    return [data] if get_world_size() == 1 else gather_bytes(data, call_tag='states')


def unpack(data: Tensor) -> Any:
    """Unpack what :func:`gather_packed` gathered of one rank."""
    with safe_loading('of several ranks'):
        return torch.load(io.BytesIO(to_bytes(data)))


def loader_states(runner: AnyRunner) -> Dict[str, Dict]:
    """By loader, how many passes it has begun, and whether its persistent workers run."""
    states = {}
    for name, loader in loaders_by_name(runner).items():
        batches = resumable_batches(loader)
        states[name] = dict(
            passes=0 if batches is None else batches.epoch + 1,
            workers_run=getattr(loader, 'persistent_workers', False)
            and getattr(loader, '_iterator', None) is not None,
        )
    return states


def restore_loaders(runner: AnyRunner, states: Dict[str, Dict]) -> None:
    """Restore what :func:`loader_states` returned, before training."""
    for name, loader in loaders_by_name(runner).items():
        if name not in states:
            continue
        batches = resumable_batches(loader)
        if batches is not None:
            batches.epoch = states[name]['passes'] - 1
        if states[name]['workers_run']:
            restart_workers_silently(loader)


def restart_workers_silently(loader: DataLoader) -> None:
    """Prevent a data loader from drawing a random number when it starts persistent workers.

    It draws one when it starts them and none in later passes, so a resumed run would draw one
    more than the run that it continues.
    """
    persist = getattr(loader, 'persistent_workers', False) and loader.num_workers > 0
    if persist and loader._iterator is None:
        loader._iterator = _WorkersToStart()


class _WorkersToStart:
    """Stand for the iterator of a data loader whose persistent workers are yet to be started."""

    def _reset(self, loader: DataLoader, first_iter: bool = False) -> None:
        """Replace itself by the real iterator; called when the loader begins its next pass."""
        loader._iterator = start_silently(loader)


def loaders_by_name(runner: AnyRunner) -> Dict[str, Any]:
    """The main loader of training, and those of validation, which begin anew each time."""
    train, val = loader_of(runner.train_loop), loaders_of(runner.val_loop)
    named = {f'val/{index + 1}' if index else 'val': each for index, each in enumerate(val)}
    return named if train is None else dict(named, train=train)


#: Of one rank; more than that is no statistics, and would make a checkpoint too large.
MOST_BYTES = 64 * 2**20


def gather_buffers(model: nn.Module, accelerator: Accelerator) -> Optional[List[Tensor]]:
    """Gather the bytes of buffers by rank; None if they are equal, too large or differ in size."""
    if get_world_size() == 1:
        return None
    host = accelerator.copies.to_host(list(model.buffers()))
    parts = [view_as_dtype(value.contiguous().reshape(-1), torch.uint8) for value in host]
    mine = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
    digest = hashlib.sha256(mine.numpy().tobytes()).hexdigest()
    found = gather_json([mine.numel(), digest])
    equal = all(each == found[0] for each in found)
    if equal or mine.numel() > MOST_BYTES or any(size != mine.numel() for size, _ in found):
        return None
    return [each.cpu() for each in all_gather(mine.to(group_device()))]


def restore_buffers(model: nn.Module, accelerator: Accelerator, packed: Tensor) -> bool:
    """Restore what :func:`gather_buffers` gathered; False if the model has other sizes."""
    buffers = list(model.buffers())
    sizes = [buffer.numel() * buffer.element_size() for buffer in buffers]
    if sum(sizes) != packed.numel():
        return False
    values = [
        # A copy, because a view needs an aligned start.
        view_as_dtype(part.clone(), buffer.dtype).reshape(buffer.shape)
        for part, buffer in zip(packed.split(sizes), buffers)
    ]
    # A moving average counts its steps in a buffer that stays on the host.
    on_host = [(value, b) for value, b in zip(values, buffers) if b.device.type == 'cpu']
    on_device = [(value, b) for value, b in zip(values, buffers) if b.device.type != 'cpu']
    with torch.no_grad():
        for value, buffer in on_host:
            buffer.copy_(value)
        accelerator.copies.into_device([v for v, _ in on_device], [b for _, b in on_device])
    return True
