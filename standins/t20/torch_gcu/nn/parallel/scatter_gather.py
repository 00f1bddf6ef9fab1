"""Cutting nested inputs into one piece for each card, and joining the outputs."""

import torch

from . import comm


def scatter(inputs, target_gpus, dim=0):
    def cut(value):
        if isinstance(value, torch.Tensor):
            return list(comm.scatter(value, target_gpus, None, dim))
        if isinstance(value, (list, tuple)) and value:
            return [type(value)(part) for part in zip(*map(cut, value))]
        if isinstance(value, dict) and value:
            return [dict(zip(value, part)) for part in zip(*map(cut, value.values()))]
        return [value for _ in target_gpus]

    return cut(inputs)


def scatter_kwargs(inputs, kwargs, target_gpus, dim=0):
    inputs = scatter(inputs, target_gpus, dim) if inputs else []
    kwargs = scatter(kwargs, target_gpus, dim) if kwargs else []
    inputs += [()] * (len(kwargs) - len(inputs))
    kwargs += [{}] * (len(inputs) - len(kwargs))
    return tuple(inputs), tuple(kwargs)


def gather(outputs, target_device, dim=0):
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        if first.dim() == 0 and dim == 0:
            outputs = [output.view(1) for output in outputs]
        return comm.gather(outputs, dim, target_device)
    if first is None:
        return None
    if isinstance(first, dict):
        return {key: gather([o[key] for o in outputs], target_device, dim) for key in first}
    return type(first)(gather(values, target_device, dim) for values in zip(*outputs))
