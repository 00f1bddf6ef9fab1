"""Build the batch of received columns, without the samples in between."""

from typing import Any, Sequence

import torch
from torch import Tensor

from mmdevplug.accelerators import to_device
from mmdevplug.distributed.byte_exchange import to_tensor
from mmdevplug.utils.torch_compat import view_as_dtype

from .columns import NUMBERS
from .serialize import Header, read_columns
from .unflatten import Plan


def are_alike(headers: Sequence[Header]) -> bool:
    """Whether all samples of all ranks, at least one, came in columns of the same structure."""
    # Ranks without samples have no kinds either.
    filled = [header for header in headers if header.kinds]
    return bool(filled) and all(
        header.rows
        and header.structures == filled[0].structures
        and header.shapes == filled[0].shapes
        for header in filled
    )


def build_batch(buffers: Sequence[Tensor], headers: Sequence[Header], device: torch.device) -> Any:
    """Stack the samples of all ranks, which are alike, as ``stack_samples`` does."""
    pairs = [pair for pair in zip(buffers, headers) if pair[1].rows]
    plan = Plan.of(pairs[0][1].structures[0], allow_pickle=False)
    received = [read_columns(*pair, plan) for pair in pairs]
    rows = sum(each.rows for each in received)
    values = [
        _stack_values(word, column, rows)
        for word, *column in zip(plan.values, *[each.values for each in received])
    ]
    blocks = [torch.cat(column) for column in zip(*[each.blocks for each in received])]
    shaped = [(block, tuple(block.shape)) for block in blocks]
    return to_device(plan.build(iter(values), iter(shaped)), device)


def _stack_values(word: str, columns: Sequence[Any], rows: int) -> Any:
    """What ``stack_samples`` makes of plain values: a tensor of numbers, or a list."""
    if word in NUMBERS:
        numbers = view_as_dtype(to_tensor(b''.join(columns)), NUMBERS[word][1])
        return numbers.to(torch.get_default_dtype()) if word == 'float' else numbers
    if word == 'None':
        return [None] * rows
    return [value for column in columns for value in column]
