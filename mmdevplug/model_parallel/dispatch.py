"""Dispatch a planned model to its devices with HF accelerate, and do what that leaves undone."""

import functools
import warnings
from typing import Any, Iterator, Tuple

import torch
from torch import nn

from mmdevplug.errors import PlacementError
from mmdevplug.model.move import place_by_plan
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
    are those of the model as it was.

    Args:
        model (nn.Module): The model that the plan was made for, on the host; changed in place.
        plan (DevicePlan): Where its parts go.

    Returns:
        nn.Module: The same model, with the plan as its attribute ``device_plan``.

    Raises:
        PlacementError: If HF accelerate is missing, the plan was made for another model, or a
            tensor did not go where it was sent.
    """
    plan.check(model)
    try:
        import accelerate
    except ImportError as error:
        raise PlacementError(
            f'a model over several devices needs HF accelerate, which cannot be imported: '
            f'{error}. Install it: pip install accelerate torch=={torch.__version__}'
        ) from error
    main = plan.devices[0]
    on_host = 'cpu' in plan.device_map.values()
    with warnings.catch_warnings():
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
    for name in ('to', 'cuda', 'npu', 'mlu', 'musa', 'sdaa', 'neuron', 'xpu'):
        # They warn of a move, and a copy of the model would move the original.
        vars(model).pop(name, None)
    place_by_plan(model, plan)
    align_methods(model, plan)
    model.device_plan = plan
    return model


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
