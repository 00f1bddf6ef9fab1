"""Check the arguments of the model wrapper, and turn them into those of PyTorch's DDP."""

import inspect
import os
from typing import Any, Dict

import torch
from mmengine.model import is_model_wrapper
from torch import distributed as torch_dist, nn
from torch.nn.parallel import DistributedDataParallel

from mmdevplug.accelerators import Accelerator, devices_of
from mmdevplug.config.fields import did_you_mean
from mmdevplug.config.model_wrapper import WrapperOptions
from mmdevplug.distributed.coalesced import broadcast_tensors
from mmdevplug.errors import LaunchError, ModelError
from mmdevplug.model.move import check_materialized
from mmdevplug.utils.pytree import tensor_bytes
from mmdevplug.utils.torch_compat import is_at_least

from .unused_parameters import trainable


def check_module(module: nn.Module) -> None:
    """Raise ModelError if there is nothing to wrap: see the wrapper's ``Raises``."""
    if not isinstance(module, nn.Module):
        raise ModelError(
            f'the model is {module!r} of type {type(module).__name__}; expected an nn.Module, '
            f'whose parameters can be averaged. Pass the module itself, or an nn.Module that '
            f'calls the function.'
        )
    check_materialized(module)
    if is_model_wrapper(module):
        raise ModelError(
            f'the model is wrapped already, in {type(module).__name__}; expected the bare model. '
            f'Pass model.module, or remove the model_wrapper_cfg that wraps it a second time.'
        )
    refuse_frozen(module)


def refuse_frozen(module: nn.Module) -> None:
    """Raise ModelError for a model without parameters to train, which ranks cannot average."""
    if trainable(module):
        return
    total = sum(1 for _ in module.parameters())
    raise ModelError(
        f'{type(module).__name__} has no parameter that requires a gradient ({total} parameters, '
        f'all frozen when it was built); expected at least one. Unfreeze part of the model '
        f'(frozen_stages, requires_grad), or run it without a launcher.'
    )


def read_options(wrapper: Any, kwargs: Dict[str, Any]) -> WrapperOptions:
    """Take our options out of ``kwargs``, which then holds what PyTorch's DDP takes."""
    names = WrapperOptions.names()
    given = {}
    for name in set(kwargs).intersection(names):
        given[name] = kwargs.pop(name)
    torchs = inspect.signature(DistributedDataParallel.__init__).parameters
    unknown = sorted(set(kwargs) - set(torchs))
    if unknown:
        ours = inspect.signature(wrapper.__init__).parameters
        raise TypeError(
            f'model_wrapper_cfg has {", ".join(unknown)}, which neither '
            f'DeviceDistributedDataParallel nor the DistributedDataParallel of torch '
            f'{torch.__version__} takes{did_you_mean(unknown, [*names, *torchs, *ours])} Correct '
            f'the name or remove it.'
        )
    options = WrapperOptions.from_dict(given)
    if not (torch_dist.is_available() and torch_dist.is_initialized()):
        raise LaunchError(
            'DeviceDistributedDataParallel needs a process group and there is none. Use '
            "runner_type='DeviceRunner' with --launcher pytorch, or call "
            'mmdevplug.init_device(launcher=...) before the model is wrapped.'
        )
    return options


#: Gradients of fewer bytes take less time in messages than in shared memory, where ranks wait.
_LEAST_SHARED_BYTES = 4 << 20
#: The part of the gradients that a bucket between hosts holds, whose link works from the first
#: bucket to the end; and its least and most bytes.
_PART_BETWEEN_HOSTS, _LEAST_BETWEEN_HOSTS, _MOST_BETWEEN_HOSTS = 8, 1 << 20, 8 << 20


def ddp_arguments(
    options: Dict[str, Any],
    accelerator: Accelerator,
    module: nn.Module,
    device: torch.device,
    on_host: bool,
    shares: bool,
) -> Dict[str, Any]:
    """Arguments of DDP for a module on its device.

    On a group that averages on the host, gradients are views of a bucket. The message of a small
    bucket starts earlier; where ranks share memory, ``shares``, waiting costs more. DDP sends
    buffers once at the start, whether or not it sends them at each forward.
    """
    if on_host:
        size = sum(map(tensor_bytes, trainable(module).values()))
        world_size = torch_dist.get_world_size()
        if not (shares and size >= _LEAST_SHARED_BYTES):
            cap = 5 << 20
        elif int(os.environ.get('LOCAL_WORLD_SIZE', world_size)) < world_size:
            part = size // _PART_BETWEEN_HOSTS
            cap = min(max(part, _LEAST_BETWEEN_HOSTS), _MOST_BETWEEN_HOSTS)
        else:
            cap = 16 << 20
        options = {**dict(gradient_as_bucket_view=True, bucket_cap_mb=cap / 2**20), **options}
    on_several = len(devices_of(module.parameters())) > 1  # DDP then takes no device ids
    options['device_ids'] = None if on_several or device.type != 'cuda' else [device.index]
    if 'forward_sync_buffers' in inspect.signature(DistributedDataParallel.__init__).parameters:
        options['forward_sync_buffers'] = options.pop('broadcast_buffers')
    elif not options['broadcast_buffers']:
        # Without this, older releases leave the buffers of each rank as they are.
        broadcast_tensors(list(module.buffers()), accelerator, options['process_group'])
    return options


def check_compressible(module: nn.Module) -> None:
    """Raise ModelError if a gradient cannot travel as bfloat16."""
    for name, parameter in trainable(module).items():
        if not parameter.dtype.is_floating_point:
            raise ModelError(
                f"model_wrapper_cfg.grad_compression='bf16' compresses real floating-point "
                f'gradients, but that of {name} is {parameter.dtype}. Train that parameter in '
                f"a floating-point dtype, or set grad_compression='none'."
            )


def suits_ddp(find_unused_parameters: bool) -> bool:
    """Whether PyTorch's DDP works on an eager device whose tensors gloo does not take."""
    from mmdevplug.staged.host_buffers import can_pin

    # PyTorch 1 does not know groups of `staged`. To find unused parameters DDP pins memory.
    return is_at_least('2.0') and (can_pin() or not find_unused_parameters)
