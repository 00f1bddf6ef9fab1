"""Calling the copies of a module."""

import torch


def get_a_var(obj):
    if isinstance(obj, torch.Tensor):
        return obj
    values = obj.items() if isinstance(obj, dict) else obj
    if isinstance(obj, (list, tuple, dict)):
        for value in values:
            found = get_a_var(value)
            if found is not None:
                return found
    return None


def parallel_apply(modules, inputs, kwargs_tup=None, devices=None):
    # One after the other: the copies share one host's processor.
    kwargs_tup = [{}] * len(modules) if kwargs_tup is None else kwargs_tup
    assert len(modules) == len(inputs) == len(kwargs_tup)
    assert devices is None or len(devices) == len(modules)
    return [
        module(*(input if isinstance(input, (list, tuple)) else (input,)), **kwargs)
        for module, input, kwargs in zip(modules, inputs, kwargs_tup)
    ]
