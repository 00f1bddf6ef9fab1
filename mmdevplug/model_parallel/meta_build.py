"""Build models from their configs without memory for their weights."""

import copy
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Callable, Optional, Tuple

import torch
from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope
from torch import nn

from mmdevplug.errors import DevPlugError, PlacementError, first_line


def can_build_on_meta() -> bool:
    """Whether this PyTorch has a default device that holds only shapes."""
    return hasattr(torch.device, '__enter__')


def build_without_memory(model: object, scope: str) -> nn.Module:
    """Build a model from its config on the meta device.

    It is on the host where the model computes with tensors while it is built, or where PyTorch is
    older than 2.0.
    """
    with DefaultScope.overwrite_default_scope(scope):
        if not can_build_on_meta():
            return MODELS.build(copy.deepcopy(model))
        try:
            with torch.device('meta'):
                return MODELS.build(copy.deepcopy(model))
        except (RuntimeError, NotImplementedError) as error:
            # Stochastic depth is often a list of numbers taken from a tensor.
            if 'meta' not in str(error).lower():
                raise
        with torch.device('cpu'):
            return MODELS.build(copy.deepcopy(model))


def build_from_file(
    path: str, load: Callable[[str], Config] = Config.fromfile
) -> Tuple[nn.Module, Optional[Config]]:
    """Build the model that a file describes; also return the config if it is OpenMMLab's.

    The file is a config of OpenMMLab's (.py, .json, .yaml), or the ``config.json``, or its folder,
    of a transformers model. ``load`` reads the former.

    Raises:
        PlacementError: If there is no such file, or the model cannot be built.
    """
    place = Path(path)
    if place.is_dir():
        place = place / 'config.json'
    if not place.is_file():
        raise PlacementError(
            f'{str(place)!r} is no file. Give a config of OpenMMLab, or the config.json of a '
            f'transformers model or its folder.'
        )
    try:
        if place.suffix == '.json' and 'model_type' in json.loads(place.read_text('utf-8')):
            return build_transformers(str(place)), None
        cfg = load(str(place))
        if cfg.get('model') is None:
            raise PlacementError(f"{path!r} has no `model`; expected model = dict(type='...').")
        return build_without_memory(cfg.model, cfg.get('default_scope') or 'mmengine'), cfg
    except DevPlugError:
        raise
    except Exception as error:
        # Configs and models raise errors of any kind.
        raise PlacementError(
            f'the model of {path!r} cannot be built: {type(error).__name__}: {first_line(error)}'
        ) from error


def build_transformers(path: str) -> nn.Module:
    """Build a model from the ``config.json`` of transformers, with the head that it names."""
    try:
        import transformers
    except ImportError as error:
        raise PlacementError(
            f'{path!r} is a transformers model, and transformers cannot be imported: '
            f'{first_line(error)}. Install it: pip install transformers'
        ) from error
    config = transformers.AutoConfig.from_pretrained(path)
    named = [getattr(transformers, name, None) for name in config.architectures or ()]
    kind = next((kind for kind in named if kind is not None), None)
    with torch.device('meta') if can_build_on_meta() else nullcontext():
        if kind is not None:
            return kind(config)
        return transformers.AutoModel.from_config(config)
