"""Copies and sums between the cards of a process, which autograd follows by itself."""

import torch

from ...core.device import _index_of


def _card(device):
    return torch.device('xla', _index_of(device, optional=True))


def _put(results, out):
    for target, result in zip(out, results):
        target.copy_(result)
    return tuple(out)


def broadcast(tensor, devices=None, *, out=None):
    if (devices is None) == (out is None):
        raise RuntimeError(
            "Exactly one of 'devices' and 'out' must be specified, but got "
            f'devices={devices} and out={out}'
        )
    if out is not None:
        return _put([tensor] * len(out), out)
    return tuple(tensor.to(_card(device)) for device in devices)


def broadcast_coalesced(tensors, devices, buffer_size=64 * 1024 * 1024):
    return [[tensor.to(_card(device)) for tensor in tensors] for device in devices]


def reduce_add(inputs, destination=0):
    for index, tensor in enumerate(inputs):
        assert tensor.device.type == 'xla', f'reduce_add expects GCU, got {tensor.device.type}'
        if tensor.shape != inputs[0].shape:
            raise ValueError(
                f'input {index} has invalid size: got {tuple(tensor.shape)}, but expected '
                f'{tuple(inputs[0].shape)}'
            )
    target = _card(destination)
    if all(tensor.device != target for tensor in inputs):
        raise RuntimeError(
            'reduce_add expects destination to be on the same GPU with one of the tensors'
        )
    return sum(tensor.to(target) for tensor in inputs)


def reduce_add_coalesced(inputs, destination=0, buffer_size=64 * 1024 * 1024):
    return tuple(reduce_add(tensors, destination) for tensors in zip(*inputs))


def scatter(tensor, devices=None, chunk_sizes=None, dim=0, *, out=None):
    if out is None:
        count = len(devices)
        chunks = tensor.split(chunk_sizes, dim) if chunk_sizes else tensor.chunk(count, dim)
        return tuple(chunk.to(_card(device)) for chunk, device in zip(chunks, devices))
    for name, value in (('devices', devices), ('chunk_sizes', chunk_sizes)):
        if value is not None:
            raise RuntimeError(
                f"'{name}' must not be specified when 'out' is specified, but got {name}={value}"
            )
    return _put(tensor.split([target.size(dim) for target in out], dim), out)


def gather(tensors, dim=0, destination=None, *, out=None):
    if out is not None:
        if destination is not None:
            raise RuntimeError(
                "'destination' must not be specified when 'out' is specified, but got "
                f'destination={destination}'
            )
        return _put([gather(tensors, dim)], [out])[0]
    on_host = destination == -1 or (
        isinstance(destination, (str, torch.device)) and torch.device(destination).type == 'cpu'
    )
    target = torch.device('cpu') if on_host else _card(destination)
    return torch.cat([tensor.to(target) for tensor in tensors], dim)
