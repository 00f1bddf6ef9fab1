"""Explain that a layer has one value per channel, of which it can compute no variance."""

import re
import traceback
from contextlib import contextmanager
from typing import Any, Iterator, List

from torch import nn

from mmdevplug.device_guard.stack_location import module_and_backward
from mmdevplug.errors import ModelError
from mmdevplug.utils.model import unwrap_model

from .out_of_memory import batch_size_of

#: What PyTorch says, for batch and group normalization and for instance normalization.
_ONE_VALUE = re.compile(
    r'Expected more than 1 (value per channel|spatial element) when training, got input size '
    r'(?:torch\.Size\()?\[([\d, ]+)\]'
)


@contextmanager
def explain_one_value(runner: Any, stage: str) -> Iterator[None]:
    """Replace PyTorch's error by one that names the layer, the rank, and what to change.

    Its stage is ``'train'``, ``'val'`` or ``'test'``: that data loader is named.
    """
    try:
        yield
    except ValueError as error:
        found = _ONE_VALUE.search(str(error))
        if found is None:
            raise
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        layer, _ = module_and_backward(unwrap_model(runner.model), reversed(frames))
        layer = layer.replace('(_', '(')  # MMEngine's, of one process: _BatchNormXd
        shape = [int(size) for size in found[2].split(',')]
        by_picture = found[1] != 'value per channel'
        advice = _for_pictures() if by_picture else _for_batches(runner, stage, layer, shape)
        raise ModelError(
            f'rank {runner.rank}, {stage}: layer {layer or "outside the model"} got an input of '
            f'shape {tuple(shape)}, which is 1 value per channel'
            f'{" of a picture" if by_picture else ""}; expected at least 2 to compute a variance '
            f'from. {advice}'
        ) from error


def _for_pictures() -> str:
    return (
        'More samples in a batch do not help: take larger inputs, or a norm_cfg that does not '
        "normalize each picture by itself, e.g. dict(type='BN')."
    )


def _for_batches(runner: Any, stage: str, layer: str, shape: List[int]) -> str:
    key = f'{stage}_dataloader'
    size = batch_size_of(getattr(runner, f'_{key}', None))
    if f'({nn.GroupNorm.__name__})' in layer:
        return f'Set num_groups below the number of channels, or {key}.batch_size to 2 or more.'
    rest = f'{key}.drop_last=True leaves out the rest of an epoch'
    if size is not None and size > shape[0]:
        found = f'{key}.batch_size is {size}, and this is the rest of an epoch: {rest}'
    else:
        found = f'{key}.batch_size is {size}: set it to 2 or more; {rest}'
    return (
        f'{found}. Or keep the layer in eval mode, as norm_eval=True does in backbones of '
        f'OpenMMLab.'
    )
