"""Load weights into a model, say what of a checkpoint fits, and refuse one of another model."""

import logging
import re
from typing import Any, List, Mapping, NamedTuple, Optional, Sequence

from mmengine.logging import print_log
from mmengine.model import BaseTTAModel, is_model_wrapper
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from mmdevplug.errors import CheckpointError

from .torch_load import last_read

#: How many names a message lists.
_SHOWN = 5
#: How ``nn.Module`` reports a tensor of another shape.
_OTHER_SHAPE = re.compile(
    r'size mismatch for (\S+): copying a param with shape (?:torch\.Size\()?\[?(.*?)\]?\)? from '
    r'checkpoint, the shape in current model is (?:torch\.Size\()?\[?(.*?)\]?\)?\.',
    re.DOTALL,
)


class Fit(NamedTuple):
    """Which names of a checkpoint and of a model fit together."""

    #: The names of the model and of the checkpoint, ``num_batches_tracked`` left out.
    model: List[str]
    checkpoint: List[str]
    missing: List[str]
    unexpected: List[str]
    #: Why tensors were not copied, each as ``name: reason``.
    refused: List[str]
    #: Names of the model that are trained.
    trained: Sequence[str] = ()

    @property
    def loaded(self) -> int:
        """How many names of the model were loaded."""
        return len(self.model) - len(self.missing) - len(self.refused)

    @property
    def complete(self) -> bool:
        """Whether all names of both fit."""
        return not (self.missing or self.unexpected or self.refused)

    def describe(self, filename: str) -> str:
        """Say in one line what was loaded and what was not."""
        parts = [f'{self.loaded} of {len(self.model)} names of the model loaded']
        if self.missing:
            parts.append(f'{len(self.missing)} missing in the checkpoint ({_some(self.missing)})')
        if self.unexpected:
            parts.append(f'{len(self.unexpected)} unexpected in it ({_some(self.unexpected)})')
        if self.refused:
            parts.append(f'{len(self.refused)} of other shapes ({_some(self.refused, "; ")})')
        if self.loaded < len(self.model):
            parts[-1] += '. What was not loaded keeps its initial values'
        return f'Checkpoint {filename} fits the model in part: {", ".join(parts)}.'

    def refuse_if_nothing_fits(self, filename: str, weights: Mapping[str, object]) -> None:
        """Raise CheckpointError if the model has names and none was loaded."""
        if self.loaded or not self.model:
            return
        shapes = f' Of other shapes: {_some(self.refused, "; ")}.' if self.refused else ''
        raise CheckpointError(
            f'no key of checkpoint {filename} fits the model, and nothing was loaded. The '
            f'checkpoint has {len(self.checkpoint)}: {_some(self.checkpoint) or "none"}; the '
            f'model has {len(self.model)}: {_some(self.model)}.{shapes} '
            + (
                _hint(self.model, weights)
                or 'Give a checkpoint of this model, or rename its keys.'
            )
        )


def load_state_dict(
    module: nn.Module,
    state_dict: Mapping[str, object],
    strict: bool = False,
    logger: object = None,
    filename: Optional[str] = None,
) -> Fit:
    """Load weights as ``mmengine.runner.checkpoint.load_state_dict``, and say what fits.

    Raises CheckpointError if nothing fits, or with ``strict`` if anything does not.
    """
    filename = filename or last_read()
    fit = load_weights(module, state_dict)
    fit.refuse_if_nothing_fits(filename, state_dict)
    if not fit.complete:
        if strict:
            raise CheckpointError(f'{fit.describe(filename)} Expected all of it: strict=True.')
        print_log(fit.describe(filename), logger or 'current', logging.WARNING)
    return fit


def load_weights(model: nn.Module, state_dict: Mapping[str, object]) -> Fit:
    """Load what fits of a ``state_dict``, as MMEngine does, and return what does and what not."""
    names: List[str] = []
    missing: List[str] = []
    unexpected: List[str] = []
    refused: List[str] = []
    metadata = getattr(state_dict, '_metadata', None) or {}
    trained: List[str] = []
    held = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    if all(name.startswith('module.') for name in held) and not any(
        name.startswith('module.') for name in state_dict
    ):
        model = getattr(model, 'module', model)  # a wrapper class that MMEngine does not register

    def load(module: Any, local: Mapping[str, Any], prefix: str = '') -> None:
        if is_model_wrapper(module) or isinstance(module, BaseTTAModel):
            module, start = module.module, f'{prefix}module.'
            if 'module' not in module._modules:  # MMEngine saves the names of wrappers inside
                local = {
                    prefix + k[len(start) :] if k.startswith(start) else k: v
                    for k, v in local.items()
                }
        left_out = module._non_persistent_buffers_set
        own = {**module._parameters, **module._buffers}
        names.extend(prefix + n for n, v in own.items() if v is not None and n not in left_out)
        trained.extend(prefix + n for n, v in own.items() if v is not None and v.requires_grad)
        # Subclasses rename keys here, of releases before them.
        version = metadata.get(prefix[:-1], {})
        module._load_from_state_dict(local, prefix, version, True, missing, unexpected, refused)
        for name, child in module._modules.items():
            if child is not None:
                start = f'{prefix}{name}.'
                load(child, {k: v for k, v in local.items() if k.startswith(start)}, start)
        for hook in getattr(module, '_load_state_dict_post_hooks', {}).values():
            hook(module, _IncompatibleKeys(missing, unexpected))

    load(model, dict(state_dict))
    return Fit(
        [name for name in names if 'num_batches_tracked' not in name],
        [name for name in state_dict if 'num_batches_tracked' not in name],
        [name for name in missing if 'num_batches_tracked' not in name],
        list(unexpected),
        [_OTHER_SHAPE.sub(r'\1: (\2) in the checkpoint, (\3) in the model', e) for e in refused],
        trained,
    )


def _some(names: Sequence[str], separator: str = ', ') -> str:
    more = len(names) - _SHOWN
    return separator.join(names[:_SHOWN]) + (f' and {more} more' if more > 0 else '')


def _hint(names: Sequence[str], state_dict: Mapping[str, object]) -> str:
    """Advise on weights that have other prefixes in the checkpoint, or fit only a part."""
    inside = [key for key, value in state_dict.items() if isinstance(value, Mapping) and value]
    if inside:
        return (
            f'It holds more under {_some(inside)}: save the weights alone, '
            f'torch.save(dict(state_dict=...)), and give that file.'
        )
    for key in state_dict:
        for name in names:
            if key != name and key.endswith('.' + name):
                prefix = key[: -len(name)]
                return (
                    f'{key} fits without {prefix!r}: load it by init_cfg=dict(type="Pretrained", '
                    f'prefix={prefix!r}, checkpoint=...) of the part of the model.'
                )
            if key != name and name.endswith('.' + key):
                part = name[: -len(key) - 1]
                return (
                    f'{key} fits model.{part}: load it by model.{part}.init_cfg='
                    f'dict(type="Pretrained", checkpoint=...).'
                )
    return ''
