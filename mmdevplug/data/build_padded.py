"""Build models whose data preprocessors pad."""

import copy
import logging
from typing import Any, Callable, List, Optional, Tuple

from mmengine.logging import print_log
from mmengine.model import BaseDataPreprocessor
from torch import nn

from mmdevplug.config.pad_to import PadTo, read_pad_to
from mmdevplug.errors import DevPlugError, ModelError

from .padding import PaddedForward, padded_forward


def build_padded(
    build: Callable[[Any], nn.Module], model: Any, option: Optional[PadTo] = None
) -> nn.Module:
    """Build a model whose data preprocessors pad, if its config or an option says so.

    Args:
        build (callable): Builds a model from its config.
        model (dict or nn.Module): With or without ``pad_to`` in ``data_preprocessor``, which wins
            over the option, also as None.
        option (PadTo, optional): ``accelerator.pad_to``. Defaults to None: no padding.

    Returns:
        nn.Module: The model.

    Raises:
        DevPlugError: If ``pad_to`` has no such form.
        ModelError: If the model has no data preprocessor.
    """
    model, found = take_pad_to(model)
    built = build(model)
    pad_to = read_pad_to(found[0], 'data_preprocessor.pad_to') if found else option
    if pad_to is not None:
        install_padding(built, pad_to)
    return built


def take_pad_to(model: Any) -> Tuple[Any, List[Any]]:
    """Take ``pad_to`` out of every ``data_preprocessor`` in the config of a model.

    Args:
        model (dict or nn.Module): Left as it is.

    Returns:
        tuple: The config without the key, and the different values found.

    Raises:
        DevPlugError: If there are several values.
    """
    found: List[Any] = []
    _find_pad_to(model, found)
    if not found:
        return model, found
    if any(value != found[0] for value in found):
        raise DevPlugError(
            f'data_preprocessor.pad_to has several values in one model: '
            f'{", ".join(map(repr, found))}. Keep one.'
        )
    model = copy.deepcopy(model)
    _find_pad_to(model, [], remove=True)
    return model, found[:1]


def _find_pad_to(config: Any, found: List[Any], remove: bool = False) -> None:
    if not isinstance(config, dict):
        return
    for key, value in config.items():
        if key == 'data_preprocessor' and isinstance(value, dict) and 'pad_to' in value:
            found.append(value.pop('pad_to') if remove else value['pad_to'])
        _find_pad_to(value, found, remove)


def install_padding(model: nn.Module, pad_to: PadTo) -> None:
    """Let the data preprocessors in a model pad.

    Args:
        model (nn.Module): Changed in place.
        pad_to (PadTo): To which size.

    Raises:
        ModelError: If there is no data preprocessor.
    """
    found = [part for part in model.modules() if isinstance(part, BaseDataPreprocessor)]
    if not found:
        raise ModelError(
            f'pad_to is given, but {type(model).__name__} has no data preprocessor that could '
            f"pad. Give it one: data_preprocessor=dict(type='ImgDataPreprocessor')."
        )
    for part in found:
        held = [other for other in part.modules() if other is not part and other in found]
        if held:
            continue  # it hands its batches on to these
        forward = padded_forward(part)
        if forward is not None:
            forward.pad_to = pad_to
        else:
            part.forward = PaddedForward(part, pad_to)  # type: ignore[assignment]
    sizes = (
        f'the next multiple of {pad_to.multiple}'
        if pad_to.multiple is not None
        else 'the smallest that holds them of ' + ', '.join(map(str, pad_to.buckets))
    )
    _warn_of_diluted_losses(model, found)
    print_log(f'pad_to: batches of images are padded to {sizes}.', 'current')


def _warn_of_diluted_losses(model: nn.Module, preprocessors: List[BaseDataPreprocessor]) -> None:
    """Name losses that count padding as pixels without loss; mmseg's do unless told otherwise."""
    if not any(hasattr(part, 'seg_pad_val') for part in preprocessors):
        return
    diluted = [
        name for name, part in model.named_modules() if vars(part).get('avg_non_ignore') is False
    ]
    if diluted:
        print_log(
            f'pad_to: {", ".join(diluted)} averages over all pixels, padding included, so losses '
            f'and gradients are smaller the more padding there is. For the loss of the images '
            f'alone set avg_non_ignore=True in loss_decode, at the price of one more execution '
            f'for each loss on a lazy device.',
            'current',
            logging.WARNING,
        )
