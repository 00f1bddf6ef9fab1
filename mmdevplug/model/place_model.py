"""Place a bare model on this rank's device and make it ready for training."""

from contextlib import nullcontext
from typing import Any, Callable, Dict, Mapping, Optional, Union

import torch
from mmengine.model import MMDistributedDataParallel, revert_sync_batchnorm
from mmengine.registry import MODEL_WRAPPERS
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mmdevplug.accelerators import DeviceContext
from mmdevplug.distributed.coalesced import broadcast_tensors
from mmdevplug.errors import DevPlugError, ModelError, first_line
from mmdevplug.patches.torch_load import safe_loading
from mmdevplug.registry import class_of, with_ours
from mmdevplug.utils.logs import log_warning
from mmdevplug.utils.torch_compat import CHECKPOINTS_ANY_GENERATOR

from .move import check_materialized, move_module, weights_on_host
from .norm_layers import check_sync_bn, convert_norm_layers


def place_model(
    model: nn.Module,
    context: DeviceContext,
    model_wrapper_cfg: Optional[Mapping[str, Any]] = None,
    sync_bn: Optional[str] = None,
    find_unused_parameters: bool = False,
    spread: Optional[Callable[[nn.Module], nn.Module]] = None,
    host_losses: Union[bool, str] = 'auto',
) -> nn.Module:
    """Move a bare model to this rank's device, and wrap it if there is a process group.

    ``model_wrapper_cfg`` and ``find_unused_parameters`` are the config's; ``sync_bn`` is one of
    :data:`.norm_layers.SYNC_BN`, and in a single process no layer is synchronized; a model that
    has nothing to train can be tested, and needs no wrapper; ``spread`` puts
    the model on several devices; ``host_losses`` says which losses a lazy device leaves to the
    host, see :func:`mmdevplug.lazy.losses.compute_losses_on_host`, for models on one device.
    """
    check_sync_bn(sync_bn)
    accelerator, device = context.accelerator, context.device
    if device.type not in ('cpu', 'cuda'):
        from mmdevplug.patches.module_device import patch_module_device

        patch_module_device()
    if accelerator.compilation.lazy:
        from .lazy_model import prepare_for_lazy_device

        prepare_for_lazy_device(model, accelerator, host_losses, spread is None)
        _warn_of_checkpointed_dropout(model)
    if spread is None:
        check_materialized(model, lazy_allowed=context.backend is None)
    if context.backend is None or not any(p.requires_grad for p in model.parameters()):
        model = revert_sync_batchnorm(model)
        model = move_module(model if spread is None else spread(model), device)
        if context.backend is not None:
            broadcast_tensors([*model.parameters(), *model.buffers()], accelerator)
        if accelerator.compilation.lazy:
            from mmdevplug.lazy.predictions import materialize_predictions

            from .frozen_bn import give_frozen_gradients

            give_frozen_gradients(model)
            materialize_predictions(model, accelerator, context.devices)
        else:
            _keep_running_statistics(model, context)
        return model
    model = convert_norm_layers(model, accelerator, device, sync_bn)
    if not accelerator.compilation.lazy:
        _keep_running_statistics(model, context)
    if spread is not None:
        model = move_module(spread(model), device)
    cfg = wrapper_config(model_wrapper_cfg, find_unused_parameters)
    kind = class_of(MODEL_WRAPPERS, cfg['type'], cfg.get('_scope_'))
    if kind is not None and not issubclass(kind, DistributedDataParallel):
        move_module(model, device)  # as MMEngine's runner does
        log_warning(
            f'model_wrapper_cfg.type={kind.__name__!r} is no DistributedDataParallel, so it '
            f'averages gradients itself: NaN of one rank is not found, and ranks are not '
            f'compared. Inherit MMDistributedDataParallel to have that.'
        )
    return _build_wrapper(cfg, model)


def _build_wrapper(cfg: Dict[str, Any], model: nn.Module) -> nn.Module:
    try:
        return MODEL_WRAPPERS.build(cfg, default_args=dict(module=model))
    except (ValueError, RuntimeError) as error:
        kind = cfg['type']
        if isinstance(error, DevPlugError) or kind.__module__.split('.')[0] == 'mmdevplug':
            raise
        raise ModelError(
            f'model_wrapper_cfg.type={kind.__name__!r}: its constructor failed with '
            f'{type(error).__name__}: {first_line(error).rstrip(".")}. Expected a subclass of '
            f'{kind.__bases__[0].__bases__[0].__name__} that calls '
            f'super().__init__(module=module, **kwargs), which drops device_ids and works on any '
            f'device. Write super() in place of the name of a class.'
        ) from error


def _warn_of_checkpointed_dropout(model: nn.Module) -> None:
    """Name layers whose gradients are wrong because PyTorch runs them again with other numbers."""
    if CHECKPOINTS_ANY_GENERATOR:
        return
    found = [
        f'{outer}.{name}'.strip('.')
        for outer, part in model.named_modules()
        if getattr(part, 'with_cp', False) is True
        for name, layer in part.named_modules()
        if isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0
    ]
    if found:
        log_warning(
            f'with_cp=True: {found[0]} and {len(found) - 1} more layers drop elements inside of '
            f'segments that run a second time in backward. PyTorch {torch.__version__} restores '
            f'random numbers of CUDA alone, so other elements are dropped then, and gradients are '
            f'wrong. Expected: no dropout there. Set its rate to 0, or with_cp=False.'
        )


def _keep_running_statistics(model: nn.Module, context: DeviceContext) -> None:
    if context.accelerator.package is not None:  # PyTorch's own devices do it right
        from .running_stats import keep_running_statistics

        keep_running_statistics(model, context.accelerator, context.device)


def wrapper_config(
    model_wrapper_cfg: Optional[Mapping[str, Any]], find_unused_parameters: bool = False
) -> Dict[str, Any]:
    """Decide on the model wrapper.

    MMEngine's and PyTorch's own wrappers are replaced by ours, which takes the same arguments and
    leaves averaging to PyTorch where PyTorch can do it; under their subclasses ours are put, and
    any other is kept. Without a ``model_wrapper_cfg``, MMEngine reads ``find_unused_parameters``.
    """
    # `broadcast_buffers` as MMEngine's runner has it.
    default = dict(broadcast_buffers=False, find_unused_parameters=find_unused_parameters)
    cfg = dict(default if model_wrapper_cfg is None else model_wrapper_cfg)
    return with_ours(MODEL_WRAPPERS, cfg, MMDistributedDataParallel)


def initialize_weights(model: Any, context: DeviceContext, place: str = 'auto') -> None:
    """Initialize the weights of a bare model, and broadcast them to all ranks.

    ``place`` is the option ``accelerator.initial_weights``.
    """
    if not hasattr(model, 'init_weights'):
        return
    on_device = context.accelerator.draws_weights and not context.more_devices
    if place != 'auto':
        on_device = place == 'device'
    with nullcontext() if on_device else weights_on_host(model, context.accelerator):
        # Files of `init_cfg` are loaded safely by MMEngine's patched functions; this is for a
        # model's own `init_weights`.
        with safe_loading('named in init_cfg', forced=False):
            model.init_weights()
    if context.backend is not None:
        broadcast_tensors([*model.parameters(), *model.buffers()], context.accelerator)
