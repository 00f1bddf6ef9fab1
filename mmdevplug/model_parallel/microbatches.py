"""Split a batch into micro-batches that follow each other through the devices of a model."""

import functools
from typing import Any, Callable, Dict, List, Optional, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from mmdevplug.config.model_parallel import ModelParallelOptions
from mmdevplug.errors import ModelError
from mmdevplug.utils.logs import log_warning
from mmdevplug.utils.patching import replace_attribute


def split_batches(model: nn.Module, num_microbatches: int) -> nn.Module:
    """Make a model compute its losses micro-batch by micro-batch.

    All forward passes come before the one backward pass (the schedule of GPipe, Huang et al. 2019,
    `arXiv:1811.06965`), so devices that run asynchronously work on several micro-batches at a
    time. Losses are averaged with the sizes of the micro-batches as weights: where a loss is the
    mean over samples, the gradients are those of the whole batch.

    ``forward(mode='loss')`` of the model, which is changed in place, splits the first dimension of
    tensors and the lists of its arguments; a smaller batch is split into single samples.
    """
    ModelParallelOptions.check('num_microbatches', num_microbatches)
    if num_microbatches > 1:
        layers = [name for name, part in model.named_modules() if isinstance(part, _BatchNorm)]
        if layers:
            log_warning(
                f'model_parallel.num_microbatches={num_microbatches}: the {len(layers)} batch '
                f'normalizations of the model ({layers[0]}, ...) see one micro-batch at a time, '
                f'so the gradients are not those of the whole batch.'
            )
        # A bound method in a copy of the model would be that of the original.
        forward = vars(model).get('forward') or functools.partial(type(model).forward, model)
        in_parts = functools.partial(_forward_in_parts, num_microbatches, forward)
        replace_attribute(model, 'forward', in_parts)
    return model


def _forward_in_parts(
    num_microbatches: int, forward: Callable, *args: object, **kwargs: object
) -> Any:
    if kwargs.get('mode') != 'loss' or not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    named = {**{f'argument {i}': arg for i, arg in enumerate(args)}, **kwargs}
    sizes = {name: _length(value) for name, value in named.items()}
    known = {name: size for name, size in sizes.items() if size is not None}
    if len(set(known.values())) != 1:
        raise ModelError(
            f'model_parallel.num_microbatches: the arguments of forward() hold different numbers '
            f'of samples: {known or "none"}; expected one number. Set num_microbatches=1 for this '
            f'model.'
        )
    size = next(iter(known.values()))
    bounds = [size * i // num_microbatches for i in range(num_microbatches + 1)]
    found, weights = [], []
    for begin, end in zip(bounds, bounds[1:]):
        if end > begin:
            part = functools.partial(_part, begin=begin, end=end, size=size)
            named_parts = {name: part(arg) for name, arg in kwargs.items()}
            found.append(forward(*map(part, args), **named_parts))
            weights.append((end - begin) / size)
    return average_losses(found, weights)


def _length(value: object) -> Optional[int]:
    if isinstance(value, Tensor):
        return value.shape[0] if value.dim() else None
    if isinstance(value, dict):
        return next((n for n in map(_length, value.values()) if n is not None), None)
    return len(value) if isinstance(value, (list, tuple)) else None


def _part(value: object, begin: int, end: int, size: int) -> Any:
    """The samples of a micro-batch; what is not of the batch's length is for all of them."""
    if isinstance(value, dict):
        return {name: _part(item, begin, end, size) for name, item in value.items()}
    if isinstance(value, (Tensor, list, tuple)) and _length(value) == size:
        return value[begin:end]
    return value


def average_losses(found: Sequence[Dict[str, Any]], weights: Sequence[float]) -> Dict[str, Any]:
    """Average dicts of losses, each a tensor or a list of tensors; the weights' sum is 1."""
    names: List[str] = list(dict.fromkeys(name for losses in found for name in losses))
    missing = [name for name in names if any(name not in losses for losses in found)]
    if missing:
        raise ModelError(
            f'model_parallel.num_microbatches: {", ".join(missing)} are losses of some '
            f'micro-batches alone; expected the same of all. Set num_microbatches=1.'
        )
    return {name: _average([losses[name] for losses in found], weights) for name in names}


def _average(values: Sequence[Any], weights: Sequence[float]) -> Any:
    if isinstance(values[0], (list, tuple)):
        return [_average(items, weights) for items in zip(*values)]
    # Means first: a loss may have a value for each sample.
    return sum(value.mean() * weight for value, weight in zip(values, weights))
