"""Place a bare model on this rank's device and make it ready for training."""

from contextlib import nullcontext
from typing import Any, Callable, Dict, Mapping, Optional, Union

from mmengine.model import MMDistributedDataParallel
from mmengine.registry import MODEL_WRAPPERS
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mmdevplug.accelerators import DeviceContext
from mmdevplug.distributed.coalesced import broadcast_tensors
from mmdevplug.errors import DevPlugError, ModelError, first_line
from mmdevplug.patches.torch_load import safe_loading
from mmdevplug.registry import class_of, with_ours
from mmdevplug.utils.logs import log_warning

from .move import check_materialized, weights_on_host
from .norm_layers import check_sync_bn
from .passes import Preparation, prepare


def place_model(
    model: nn.Module,
    context: DeviceContext,
    model_wrapper_cfg: Optional[Mapping[str, object]] = None,
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
    grouped = context.backend is not None
    check_sync_bn(sync_bn)
    if spread is None:
        check_materialized(model, lazy_allowed=not grouped)
    averages = grouped and any(p.requires_grad for p in model.parameters())
    job = Preparation(
        context.accelerator,
        context.device,
        context.devices,
        averages=averages,
        sends=grouped and not averages,
        sync_bn=sync_bn,
        host_losses=host_losses,
        spread=spread,
    )
    if not averages:
        return prepare(model, job)
    cfg = wrapper_config(model_wrapper_cfg, find_unused_parameters)
    kind = class_of(MODEL_WRAPPERS, cfg['type'], cfg.get('_scope_'))
    foreign = None if kind is None or issubclass(kind, DistributedDataParallel) else kind
    model = prepare(model, job, wrapper_follows=foreign is None)
    if foreign is not None:
        log_warning(
            f'model_wrapper_cfg.type={foreign.__name__!r} is no DistributedDataParallel, so it '
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


def wrapper_config(
    model_wrapper_cfg: Optional[Mapping[str, object]], find_unused_parameters: bool = False
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
