"""When graphs are made and run, and which tensors are their outputs."""

import torch
from t20_card import calls, card, modes

import torch_gcu

from .._GCUC import JitRunMode
from .device import _check_exists, _index_of, device as _on_device

__all__ = [
    'JitRunMode',
    'synchronize',
    'unlazy',
    'sync_lived_tensor',
    'optimizer_step',
    'collect_buffers',
    'collect_amp_training_params',
    'set_scalar_cached_enable',
    'fetch_gradients',
    'clear_graph_caches',
]


def _expect(value, type_):
    if not isinstance(value, type_):
        raise TypeError(f'Param must be {type_}, got {type(value)}')


def _on_card(value):
    return isinstance(value, torch.Tensor) and value.device.type == 'xla'


def _all_on_card(values):
    return isinstance(values, (list, tuple)) and all(map(_on_card, values))


def _count(name, mode):
    _expect(mode, JitRunMode)
    calls[name] += 1
    modes[mode.name] += 1


def synchronize(device=None):
    calls['synchronize'] += 1
    with _on_device(device):
        pass  # Kernels of the stand-in have ended when they return.


def unlazy(tensors, mode=JitRunMode.SAFEASYNC):
    if not _all_on_card(tensors):
        raise TypeError('Tensors must be a list of GCU tensor.')
    _count('unlazy', mode)
    if not tensors:
        raise RuntimeError('unlazy: the list of tensors is empty')
    card.execute_some(list(tensors), 'unlazy')


def sync_lived_tensor(device=None, mode=JitRunMode.SAFEASYNC):
    index = _index_of(device, optional=True)
    _check_exists(index)
    _count('sync_lived_tensor', mode)
    card.execute_all(index, 'sync_lived_tensor')


def optimizer_step(
    optimizer,
    extra_output=None,
    optimizer_args={},  # noqa: B006  the vendor's default
    model=None,
    mode=JitRunMode.SAFEASYNC,
    device=None,
):
    _expect(optimizer, torch.optim.Optimizer)
    loss = optimizer.step(**optimizer_args)
    if model is None:
        index = _index_of(device, optional=True)
        _check_exists(index)
        _count('optimizer_step', mode)
        card.execute_all(index, 'optimizer_step')
        return loss
    _expect(model, torch.nn.Module)
    outputs = _trained(optimizer, _on_card)
    if _on_card(extra_output):
        outputs.append(extra_output)
    elif _all_on_card(extra_output):
        outputs.extend(extra_output)
    _count('optimizer_step', mode)
    card.execute_some(outputs + collect_buffers(model), 'optimizer_step')
    return loss


def _trained(optimizer, counts):
    """List parameters and the values of their optimizer state for which ``counts`` holds."""
    found = []
    for group in optimizer.param_groups:
        for parameter in group['params']:
            found.append(parameter.data)
            found.extend(value for value in optimizer.state[parameter].values() if counts(value))
    return found


def collect_buffers(model):
    _expect(model, torch.nn.Module)
    return [buffer.data for buffer in model.buffers()]


def collect_amp_training_params(model, optimizer, scaler):
    _expect(model, torch.nn.Module)
    _expect(optimizer, torch.optim.Optimizer)
    _expect(scaler, torch_gcu.amp.GradScaler)
    calls['collect_amp_training_params'] += 1
    outputs = _trained(optimizer, lambda value: isinstance(value, torch.Tensor))
    return [*outputs, *collect_buffers(model), scaler._scale, scaler._growth_tracker]


def set_scalar_cached_enable(enabled):
    calls['set_scalar_cached_enable'] += 1


def fetch_gradients(optimizer):
    _expect(optimizer, torch.optim.Optimizer)
    calls['fetch_gradients'] += 1
    parameters = [p for group in optimizer.param_groups for p in group['params']]
    return [p.grad.data for p in parameters if p.grad is not None]


def clear_graph_caches():
    calls['clear_graph_caches'] += 1
    card.clear_graphs()
