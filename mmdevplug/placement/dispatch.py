"""Putting a planned model on its devices: HF accelerate's dispatch, and what it leaves to do."""

import functools
import warnings
from typing import Any, Iterator, Tuple

import torch
from torch import Tensor, nn

from mmdevplug.errors import PlacementError

from .plan import DevicePlan

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
    accelerate = _import_accelerate()
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


def plan_of(model: nn.Module) -> Any:
    """The plan that a model was dispatched by, None for a model on a single device."""
    return getattr(model, 'device_plan', None)


def misplaced_by_plan(
    model: nn.Module, plan: DevicePlan
) -> Iterator[Tuple[str, Tensor, torch.device]]:
    """Yield the name, the tensor and the planned device of each tensor that is elsewhere."""
    for named in (model.named_parameters(), model.named_buffers()):
        for name, tensor in named:
            planned, found = plan.device_of(name), tensor.device
            if (found.type, found.index or 0) != (planned.type, planned.index or 0):
                yield name, tensor, planned


def place_by_plan(model: nn.Module, plan: DevicePlan) -> None:
    """Move each parameter and buffer that is not where the plan has it.

    Raises:
        PlacementError: If one stays behind.
    """
    from accelerate.utils import set_module_tensor_to_device

    for name, _, planned in list(misplaced_by_plan(model, plan)):
        set_module_tensor_to_device(model, name, planned)
    left = [f'{name} on {tensor.device}' for name, tensor, _ in misplaced_by_plan(model, plan)]
    if left:
        raise PlacementError(
            f'after dispatching {type(model).__name__}, these are not where the plan has them: '
            f'{", ".join(left[:8])}. Put them into a module that must not be split: '
            f"model_parallel=dict(no_split=['...'])."
        )


def align_methods(model: nn.Module, plan: DevicePlan) -> None:
    """Let the other methods of modules that are on one device move their arguments there, too."""
    for module, device in _whole_modules(model, plan):
        for method in METHODS:
            if callable(getattr(type(module), method, None)) and method not in vars(module):
                setattr(module, method, functools.partial(_call_there, module, method, device))


def _call_there(
    module: nn.Module, method: str, device: torch.device, *args: Any, **kwargs: Any
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


def _import_accelerate() -> Any:
    try:
        import accelerate
    except ImportError as error:
        raise PlacementError(
            f'a model over several devices needs HF accelerate, which cannot be imported: '
            f"{error}. Install it: pip install 'mmdevplug[placement]'"
        ) from error
    return accelerate
