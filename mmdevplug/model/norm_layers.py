"""Convert batch normalization layers: the values of ``sync_bn``."""

from typing import Any, Dict, Optional, Tuple

import torch
from mmengine.model import revert_sync_batchnorm
from mmengine.model.utils import _BatchNormXd
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from mmdevplug.accelerators import Accelerator
from mmdevplug.accelerators.backend import backend_of, takes_tensors, waits_for_backward
from mmdevplug.errors import ModelError
from mmdevplug.utils.logs import log_warning

SYNC_BN = {
    None: 'the synchronized layers of the model are made to work, others stay as they are',
    'auto': "all layers are synchronized, by PyTorch's own layer where that works, or by ours",
    'per_rank': 'no layer is synchronized: each rank normalizes with its own statistics',
}

#: MMEngine's values, of configs that were written for it: they name a package's layer, and mean
#: ``'auto'`` here.
OF_MMENGINE = ('torch', 'mmcv')


def check_sync_bn(sync_bn: Optional[str]) -> None:
    """Raise ModelError, with a list of all values, if ``sync_bn`` is none of them."""
    if isinstance(sync_bn, (str, type(None))) and sync_bn in (*SYNC_BN, *OF_MMENGINE):
        return
    listed = '; '.join(f'{value!r}: {meaning}' for value, meaning in SYNC_BN.items())
    raise ModelError(f'sync_bn={sync_bn!r}: expected one of these: {listed}.')


def convert_norm_layers(
    module: nn.Module,
    accelerator: Accelerator,
    device: torch.device,
    sync_bn: Optional[str] = None,
) -> nn.Module:
    """Convert the batch normalizations of a model, see :data:`SYNC_BN`; called by all ranks.

    ``sync_bn`` is one of these, see :func:`check_sync_bn`. Layers keep their identity, with
    parameters, buffers, hooks and flags; they only change their class.
    """
    if sync_bn is not None or any(map(_is_synchronized, module.modules())):
        return _convert(module, accelerator, device, sync_bn)
    return module


def _is_synchronized(layer: nn.Module) -> bool:
    return isinstance(layer, nn.SyncBatchNorm) or 'SyncBatchNorm' in type(layer).__name__


def _convert(
    module: nn.Module, accelerator: Accelerator, device: torch.device, sync_bn: Optional[str]
) -> nn.Module:
    from .statistics_exchange import prepare_statistics_group
    from .sync_bn import DeviceSyncBatchNorm

    if sync_bn == 'per_rank':
        for layer in _layers(module, (nn.SyncBatchNorm, DeviceSyncBatchNorm)).values():
            _change_class(layer, _BatchNormXd)
        return revert_sync_batchnorm(module)  # mmcv's
    found = _layers(module, (nn.SyncBatchNorm if sync_bn is None else _BatchNorm,))
    layers = {k: each for k, each in found.items() if not isinstance(each, DeviceSyncBatchNorm)}
    layers.update(_of_repositories(module, accelerator, device))
    known = (nn.SyncBatchNorm.forward, DeviceSyncBatchNorm.forward)
    kept = {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, nn.SyncBatchNorm) and type(layer).forward not in known
    }
    if not layers and not kept:
        return module
    works = torch_sync_bn_works(accelerator, device)
    if kept and not works:
        name, layer = next(iter(kept.items()))
        raise ModelError(
            f'{name} and {len(kept) - 1} more: {type(layer).__name__} has a forward() of its own, '
            f'which computes on CUDA alone, and ours would not call it. On {device} use layers '
            f'of the same package that do not synchronize.'
        )
    if works:
        for layer in layers.values():
            if not isinstance(layer, nn.SyncBatchNorm):
                _change_class(layer, nn.SyncBatchNorm)
        return module
    prepare_statistics_group()
    for name, layer in layers.items():
        _change_class(layer, DeviceSyncBatchNorm)
        vars(layer).update(layer_name=name, accelerator=accelerator)
    if waits_for_backward(accelerator, backend_of()):
        log_warning(
            f'{len(layers)} synchronized batch normalization layer(s) add {2 * len(layers)} graph '
            f"executions to an iteration on {device}. Set sync_bn='per_rank' to do without them; "
            f'each rank then normalizes with the statistics of its own batch.'
        )
    return module


def torch_sync_bn_works(accelerator: Accelerator, device: torch.device) -> bool:
    """Whether PyTorch's own layer works on a device, found by trying it; called by all ranks."""
    backend = backend_of()
    if waits_for_backward(accelerator, backend) or not takes_tensors(accelerator, backend):
        return False
    # It keeps a list of device types, and calls operations that few devices have.
    inputs = torch.ones(2, 1, device=device, requires_grad=True)
    try:
        nn.SyncBatchNorm(1).to(device)(inputs).sum().backward()
    except (ValueError, RuntimeError, AttributeError):
        return False
    return True


def _layers(module: nn.Module, kinds: Tuple[Any, ...]) -> Dict[str, nn.Module]:
    """The batch normalizations of some kinds, less those that do more than normalize."""
    from .frozen_bn import FrozenGradient
    from .sync_bn import DeviceSyncBatchNorm

    found = {name: part for name, part in module.named_modules() if isinstance(part, kinds)}
    plain: Tuple[Any, ...] = (_BatchNorm, nn.SyncBatchNorm, DeviceSyncBatchNorm, FrozenGradient)
    known = [kind.forward for kind in plain]
    others = [name for name, part in found.items() if type(part).forward not in known]
    if others:
        log_warning(
            f'{", ".join(others)}: {type(found[others[0]]).__name__} overrides forward(), which '
            f'batch normalization of another kind would not run; kept as it is.'
        )
    return {name: part for name, part in found.items() if name not in others}


def _of_repositories(
    module: nn.Module, accelerator: Accelerator, device: torch.device
) -> Dict[str, nn.Module]:
    """The synchronized layers of mmcv, which has them for CUDA, and of mmdet3d and others.

    The latter pass tensors of the device to collectives, which a lazy device cannot. What is
    computed on the host, such as an encoder of voxels, may keep them.
    """
    from .sync_bn import DeviceSyncBatchNorm

    ours = (nn.SyncBatchNorm, DeviceSyncBatchNorm)
    on_host = [
        part for one in module.modules() if 'forward' in vars(one) for part in one.modules()
    ]
    return {
        name: part
        for name, part in module.named_modules()
        if 'SyncBatchNorm' in type(part).__name__ and not isinstance(part, ours)
        if (part not in on_host and waits_for_backward(accelerator, backend_of()))
        or (device.type != 'cuda' and not isinstance(part, _BatchNorm))
    }


def _change_class(layer: nn.Module, cls: type) -> None:
    """Turn a batch normalization into another.

    A new layer in its place would have to be put at every place that holds the old one.
    """
    layer.__class__ = cls
    attributes = vars(cls(1))
    for name, value in attributes.items():
        vars(layer).setdefault(name, value)
    if 'process_group' not in attributes:
        vars(layer).pop('process_group', None)
