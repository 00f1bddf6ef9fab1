"""Dispatch a planned model to its devices with HF accelerate, and do what that leaves undone."""

import functools
import os
import warnings
from typing import Any, Iterator, Sequence, Tuple

import torch
from torch import nn

from mmdevplug.accelerators import available_accelerators, get_accelerator
from mmdevplug.errors import PlacementError, first_line
from mmdevplug.model.move import keep_parameters, place_by_plan
from mmdevplug.utils.patching import replace_attribute

from .device_plan import DevicePlan

#: What OpenMMLab's models call on their heads instead of ``forward``, with tensors of other parts.
METHODS = (
    'loss',
    'loss_and_predict',
    'loss_and_target',
    'loss_by_feat',
    'predict',
    'predict_by_feat',
)


def dispatch(model: nn.Module, plan: DevicePlan) -> nn.Module:
    """Spread a model over the devices of a plan.

    HF accelerate's ``dispatch_model`` moves the modules, and lets each of them move its inputs to
    its own device. What is added here: parameters and buffers that a split module holds by itself,
    and the methods that OpenMMLab's models call on their heads instead of ``forward``. Checkpoints
    are those of the model as it was. Parameters stay the same objects, so that an optimizer may be
    made before or after.

    Args:
        model (nn.Module): The model that the plan was made for, on the host; changed in place.
        plan (DevicePlan): Where its parts go.

    Returns:
        nn.Module: The same model, with the plan as its attribute ``device_plan``.

    Raises:
        PlacementError: If HF accelerate is missing, the plan is none or was made for another
            model, a device is not there, a tensor did not go where it was sent, or an optimizer
            holds parameters that had to be replaced.
    """
    if not isinstance(plan, DevicePlan):
        raise PlacementError(
            f'dispatch(model, plan={plan!r}): expected what plan() returns. Write '
            f'dispatch(model, plan(model, {plan!r}, training=True)).'
        )
    plan.check(model)
    try:
        import accelerate
    except ImportError as error:
        raise PlacementError(
            f'a model over several devices needs HF accelerate, which cannot be imported: '
            f'{error}. Install it: pip install accelerate torch=={torch.__version__}'
        ) from error
    _check_present(plan.devices)
    _warn_of_lone_ranks()
    main = plan.devices[0]
    on_host = 'cpu' in plan.device_map.values()
    with keep_parameters(model), warnings.catch_warnings():
        # Tensors that a split module holds by itself are placed below.
        warnings.filterwarnings('ignore', message='.*do not match any submodules.*')
        accelerate.dispatch_model(
            model,
            dict(plan.device_map),
            # With another main device, accelerate takes what is on the host out of memory.
            main_device='cpu' if on_host else main,
            skip_keys=getattr(model, '_skip_keys_device_placement', None),
            force_hooks=True,
        )
        place_by_plan(model, plan)
    for name in ('to', 'cuda', 'npu', 'mlu', 'musa', 'sdaa', 'neuron', 'xpu'):
        # accelerate's warn of a move, and a copy of the model would move the original.
        vars(model).pop(name, None)
    for name in ('to', 'cuda', 'cpu'):
        replace_attribute(model, name, functools.partial(_move_all, model, name))
    align_methods(model, plan)
    model.device_plan = plan
    return model


def _check_present(devices: Sequence[str]) -> None:
    """Refuse devices that hold no tensor, with what is present."""
    for name in devices:
        try:
            torch.ones(1, device=name)
        except Exception as error:  # a vendor's package may raise anything
            device_type = name.partition(':')[0]
            present = ', '.join(
                f'{each} ({accelerator.device_count()})'
                for each in available_accelerators()
                for accelerator in [get_accelerator(each)]
            )
            raise PlacementError(
                f'the device {name} of the plan is not there '
                f'({type(error).__name__}: {first_line(error)}); present are: {present}. Plan for '
                f'devices that are there, or import the package that brings {device_type} first, '
                f'e.g. torch_{device_type}.'
            ) from error


def _warn_of_lone_ranks() -> None:
    """Warn where accelerate takes a rank of a job for the only process."""
    from accelerate import PartialState

    state, world = PartialState._shared_state, int(os.environ.get('WORLD_SIZE', 1))
    if world > 1 and state and state.get('num_processes', 1) == 1:
        warnings.warn(
            f'accelerate sees num_processes=1, but WORLD_SIZE={world}: each rank trains a model '
            f'by itself, and nothing averages their gradients. Set '
            f'ACCELERATE_BYPASS_DEVICE_MAP=true and make Accelerator(cpu=True), or wrap '
            f'the model in DistributedDataParallel.',
            stacklevel=3,
        )


def _move_all(model: nn.Module, method: str, *args: Any, **options: Any) -> nn.Module:
    """Do what ``to`` does, and warn if it moves the model."""
    device = args or options
    if method == 'to':
        device = torch._C._nn._parse_to(*args, **options)[0]
    if device is not None:
        warnings.warn(
            f'{type(model).__name__}.{method}() moves a model that dispatch() has spread over '
            f'{", ".join(model.device_plan.devices)}, and its parts still send their inputs '
            f'there. Remove the call.',
            stacklevel=2,
        )
    return getattr(type(model), method)(model, *args, **options)


def align_methods(model: nn.Module, plan: DevicePlan) -> None:
    """Make other methods of modules that are on one device move their arguments there, too."""
    for module, device in _whole_modules(model, plan):
        for method in METHODS:
            if callable(getattr(type(module), method, None)) and method not in vars(module):
                there = functools.partial(_call_there, module, method, device)
                replace_attribute(module, method, there)


def _call_there(
    module: nn.Module, method: str, device: torch.device, *args: object, **kwargs: object
) -> Any:
    from accelerate.utils import send_to_device

    # Not a bound method, which a copy of the module would share with the original.
    return getattr(type(module), method)(
        module, *send_to_device(args, device), **send_to_device(kwargs, device)
    )


def _whole_modules(model: nn.Module, plan: DevicePlan) -> Iterator[Tuple[nn.Module, torch.device]]:
    """The largest modules whose tensors are all on one device, and that device."""
    taken: Tuple[str, ...] = ()
    for name, module in model.named_modules():
        if not name or name.startswith(taken):
            continue
        inside = [n for n, _ in (*module.named_parameters(), *module.named_buffers())]
        devices = {plan.device_of(f'{name}.{n}') for n in inside}
        if len(devices) == 1:
            taken = (*taken, f'{name}.')
            yield module, devices.pop()
