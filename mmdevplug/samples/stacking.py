"""Stack samples into one batch on one device."""

from contextlib import suppress
from typing import Any, List, Sequence, Union

import numpy as np
import torch
from torch import Tensor

from mmdevplug.accelerators.move_nested import to_device
from mmdevplug.errors import SampleError, first_line
from mmdevplug.utils.pytree import LIST, TUPLE, container_of, is_opaque, tensors_in

#: Their values become a tensor.
_NUMBERS = (bool, int, float, complex, np.generic)


def stack_samples(
    samples: Sequence[object], device: Union[str, torch.device], ragged: bool = False
) -> Any:
    """Stack samples of the same structure into a batch on a device.

    If all tensors are on the host, they are stacked there, and the batch is copied in one call.

    Args:
        samples (Sequence): N samples, at least one, nested as for
            :func:`mmdevplug.accelerators.to_device`.
        device (str or torch.device): The device of the batch.
        ragged (bool): Whether what differs between samples becomes a list of N values instead of
            an error. A list without tensors, such as token ids, is then one value, so that what
            it becomes does not depend on lengths. Defaults to False.

    Returns:
        Any: The structure of a sample. Tensors and NumPy arrays of shape S become tensors of
        shape (N, \\*S), numbers tensors of shape (N,), of PyTorch's default dtype if they are
        ``float``. Strings, bytes, None, and MMEngine's data elements become lists.

    Raises:
        SampleError: If structures, shapes or dtypes differ; names the place.

    Examples:
        >>> stack_samples([dict(x=torch.zeros(3), y=0), dict(x=torch.ones(3), y=1)], 'cpu')['y']
        tensor([0, 1])
    """
    samples = list(samples)
    if not samples:
        raise SampleError('stack_samples() got no samples; expected at least one.')
    if any(tensor.device.type != 'cpu' for tensor in tensors_in(samples)):
        samples = to_device(samples, device)
    return to_device(_stack(list(samples), 'sample', ragged), device)


def _stack(values: List[object], path: str, ragged: bool) -> object:
    if ragged and type(values[0]) is list and not tensors_in(values):
        return values
    try:
        return _stack_alike(values, path, ragged)
    except SampleError:
        if not ragged:
            raise
        return [_as_tensor(value) for value in values]


def _stack_alike(values: List[Any], path: str, ragged: bool) -> object:
    first = values[0]
    if isinstance(first, (Tensor, np.ndarray)):
        return _stack_tensors(values, path)
    if isinstance(first, _NUMBERS):
        return _stack_numbers(values, path)
    kind: type = type(first)
    container = container_of(kind)
    if container is None or is_opaque(kind):
        return values
    names, rows = container.names(first), []
    for index, value in enumerate(values):
        if type(value) is not type(first):
            raise _mismatch(path, index, type(first).__name__, type(value).__name__)
        found, parts = container.names(value), container.parts(value)
        rows.append(parts)
        if found == names:
            continue
        if container in (LIST, TUPLE):
            raise _mismatch(path, index, f'{len(names)} items', f'{len(value)} items')
        if set(found) != set(names):
            keys = [f'the keys {list(map(str, each))}' for each in (names, found)]
            raise _mismatch(path, index, *keys)
        rows[-1] = [parts[found.index(name)] for name in names]
    stacked = [
        _stack(list(column), path + container.step(name), ragged)
        for name, column in zip(names, zip(*rows))
    ]
    return container.build(type(first), names, stacked)


def _stack_tensors(values: List[Any], path: str) -> Tensor:
    first = values[0]
    for index, value in enumerate(values):
        if not isinstance(value, type(first)) and not isinstance(value, (Tensor, np.ndarray)):
            raise _mismatch(path, index, _describe_leaf(first), _describe_leaf(value))
        if tuple(value.shape) != tuple(first.shape) or value.dtype != first.dtype:
            raise _mismatch(path, index, _describe_leaf(first), _describe_leaf(value))
    return _stack_arrays(values, path) if isinstance(first, np.ndarray) else torch.stack(values)


def _as_tensor(value: object) -> object:
    with suppress(TypeError):  # PyTorch has not all dtypes
        return torch.from_numpy(value) if isinstance(value, np.ndarray) else value
    return value


def _stack_arrays(values: List[Any], path: str) -> Tensor:
    try:
        return torch.from_numpy(np.stack(values))
    except TypeError as error:  # PyTorch has no such dtype
        raise SampleError(f'{path} cannot be stacked: {first_line(error)}') from error


def _stack_numbers(values: List[object], path: str) -> Tensor:
    for index, value in enumerate(values):
        if not isinstance(value, _NUMBERS):
            raise _mismatch(path, index, _describe_leaf(values[0]), _describe_leaf(value))
    if isinstance(values[0], np.generic):
        return _stack_arrays(values, path)
    try:
        return torch.tensor(values)
    except (OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise SampleError(f'{path} cannot be stacked: {first_line(error)}') from error


def _describe_leaf(value: object) -> str:
    if isinstance(value, (Tensor, np.ndarray)):
        kind = 'a tensor' if isinstance(value, Tensor) else 'an array'
        dtype = str(value.dtype).replace('torch.', '')
        return f'{kind} of shape {tuple(value.shape)} and dtype {dtype}'
    return 'None' if value is None else type(value).__name__


def _mismatch(path: str, index: int, expected: str, found: str) -> SampleError:
    return SampleError(
        f'{path}: sample {index} has {found}, sample 0 has {expected}. Samples of one batch need '
        f'the same structure, shapes and dtypes: pad or convert them, or keep '
        f'lists (collate=None of DynamicSampler, ragged=True of stack_samples).'
    )
