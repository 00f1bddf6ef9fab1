"""Replace MMEngine's optimizer wrappers in a config by those that the device needs."""

import copy
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Iterator, Optional, Tuple, TypeVar

from mmengine.config import Config
from mmengine.optim import AmpOptimWrapper, OptimWrapper
from mmengine.registry import OPTIM_WRAPPERS

from mmdevplug.accelerators import Accelerator, DeviceContext
from mmdevplug.accelerators.backend import waits_for_backward
from mmdevplug.errors import ModelError
from mmdevplug.patches.autocast import mmengine_supports
from mmdevplug.registry import class_of, ours_for, replacement_of, warn_of_built
from mmdevplug.utils.annotations import AnyConfig, AnyOptimWrapper
from mmdevplug.utils.logs import log_warning
from mmdevplug.utils.model import list_optim_wrappers

if TYPE_CHECKING:
    import torch

#: A config, or an optimizer wrapper that is built already.
Given = TypeVar('Given')
ZeroRedundancyOptimizer: Any = None
with suppress(ImportError):  # as MMEngine does, for builds of PyTorch without it
    from torch.distributed.optim import ZeroRedundancyOptimizer


def adapt_optim_wrapper_cfg(cfg: Given, accelerator: Accelerator) -> Given:
    """Replace MMEngine's wrappers in a copy of a config by ours where the device needs it.

    ``OptimWrapper`` is replaced on lazy devices, and ``AmpOptimWrapper`` where MMEngine's refuses
    the device, also in the parts of a config for several optimizers; under their subclasses ours
    are put. Any other wrapper is kept.
    """
    if not isinstance(cfg, (dict, Config)):
        return cfg
    cfg = copy.copy(cfg)
    # Without a type MMEngine takes OptimWrapper; a config for several has no optimizer here.
    named = cfg.get('type', OptimWrapper if 'optimizer' in cfg else None)
    kind = class_of(OPTIM_WRAPPERS, named, cfg.get('_scope_'))
    if _is_replaced(kind, accelerator):
        cfg['type'] = ours_for(kind)
    for key, value in cfg.items():
        if isinstance(value, dict) and key != 'optimizer':
            cfg[key] = adapt_optim_wrapper_cfg(value, accelerator)
    return cfg


def use_amp(cfg: Config) -> None:
    """Replace the wrapper of each optimizer in a config, whatever its key, by AmpOptimWrapper."""
    found = list(_wrappers(cfg.optim_wrapper, 'optim_wrapper'))
    for key, wrapper, kind in found:
        # The runner takes the one for its device, with the precision that suits it.
        if kind in ('OptimWrapper', 'DeviceOptimWrapper'):
            wrapper['type'] = 'AmpOptimWrapper'
        elif kind not in ('AmpOptimWrapper', 'DeviceAmpOptimWrapper'):
            raise ModelError(
                f"--amp needs {key}.type='OptimWrapper' to replace, but found {kind!r}. Choose a "
                f'mixed-precision wrapper in the config instead.'
            )
    if not found:
        raise ModelError(
            f'--amp needs an optimizer in optim_wrapper, by itself or in a part of it, but found '
            f"{sorted(cfg.optim_wrapper)}. Choose type='AmpOptimWrapper' in the config instead."
        )
    if all('Amp' in kind for _, _, kind in found):
        log_warning('AMP is enabled in the config already.')


def _wrappers(cfg: AnyConfig, key: str) -> Iterator[Tuple[str, AnyConfig, str]]:
    """Yield the keys, the configs and the names of the types of optimizer wrappers in a config."""
    kind = cfg.get('type', 'OptimWrapper' if 'optimizer' in cfg else '')
    # New-style configs hold classes.
    name = kind.rsplit('.', 1)[-1] if isinstance(kind, str) else kind.__name__
    if 'optimizer' in cfg or name.endswith('OptimWrapper'):
        yield key, cfg, name
        return
    for part, value in cfg.items():
        if isinstance(value, dict):
            yield from _wrappers(value, f'{key}.{part}')


def _is_replaced(kind: Optional[type], accelerator: Accelerator) -> bool:
    found = None if kind is None else replacement_of(kind)
    if found is None:
        return False
    if found[0] is AmpOptimWrapper:
        return not mmengine_supports(accelerator)
    return found[0] is OptimWrapper and accelerator.compilation.lazy


def warn_of_fp16(cfg: Config) -> None:
    """Warn of the key ``fp16``, which has no effect."""
    if cfg.get('fp16') is not None:
        log_warning(
            f'fp16={cfg.fp16!r} has no effect: MMEngine does not read this key of MMCV 1. For '
            f"mixed precision write optim_wrapper = dict(type='AmpOptimWrapper', ...), or start "
            f'with --amp.'
        )


def check_optimizers(optim_wrapper: OptimWrapper, context: DeviceContext) -> None:
    """Refuse optimizers that broadcast parameters one by one where each runs a graph.

    Warn of wrappers that were built without ours, as by a constructor of the user's own.
    """
    for wrapper in list_optim_wrappers(optim_wrapper):
        if _is_replaced(type(wrapper), context.accelerator):
            warn_of_built(wrapper, "optim_wrapper=dict(type='OptimWrapper', ...)")
    backend = context.backend
    if backend is None or not waits_for_backward(context.accelerator, backend):
        return
    for optimizer in _sharded_optimizers(optim_wrapper):
        inner = type(optimizer.optim).__name__
        raise ModelError(
            f"optim_wrapper.optimizer.type='{type(optimizer).__name__}' broadcasts parameters one "
            f'by one, each of which runs a graph of the lazy device {context.device}. Use '
            f'optimizer=dict(type={inner!r}, ...) itself.'
        )


def join_consolidation(optim_wrapper: OptimWrapper) -> None:
    """Send the state of sharded optimizers to rank 0, on ranks that save no checkpoint.

    MMEngine collects the state only on the rank that saves it, which waits for the others.
    """
    for optimizer in _sharded_optimizers(optim_wrapper):
        optimizer.consolidate_state_dict()


def _sharded_optimizers(
    optim_wrapper: AnyOptimWrapper,
) -> Iterator['torch.distributed.optim.ZeroRedundancyOptimizer']:
    for wrapper in list_optim_wrappers(optim_wrapper):
        optimizer = getattr(wrapper, 'optimizer', None)
        if ZeroRedundancyOptimizer is not None and isinstance(optimizer, ZeroRedundancyOptimizer):
            yield optimizer
