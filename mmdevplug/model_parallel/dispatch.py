"""Dispatch a planned model to its devices with HF accelerate, and do what that leaves undone."""

import functools
import os
import warnings
from typing import Any, Callable, Iterator, Sequence, Tuple

import torch
from torch import nn

from mmdevplug.accelerators import available_accelerators, get_accelerator
from mmdevplug.errors import PlacementError, first_line
from mmdevplug.model.move import keep_parameters, place_by_plan, same_device
from mmdevplug.utils.logs import quiet

from .device_plan import DevicePlan
from .walk_modules import named_tensors, tied_names
from .write_back import writing_back

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
        nn.Module: The same model, with the plan as its attribute ``device_plan``. From then on it
        refuses to be moved.

    Raises:
        PlacementError: If HF accelerate is missing, the plan is none or was made for another
            model, a device is not there, a tensor did not go where it was sent, or accelerate
            takes a rank of a job for the only process.
    """
    if isinstance(model, DevicePlan) or not isinstance(plan, DevicePlan):
        given = repr(plan) if isinstance(plan, (str, list, tuple, int)) else 'devices'
        raise PlacementError(
            f'dispatch() got {type(model).__name__} as model and {type(plan).__name__} as plan: '
            f'expected a module, and what plan() returns. Write dispatch(model, plan(model, '
            f'{given}, training=True)).'
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
    _check_ranks()
    main = plan.devices[0]
    on_host = 'cpu' in plan.device_map.values()
    # It says that what is on the host is on the meta device, which it is not.
    with keep_parameters(model), warnings.catch_warnings(), quiet('accelerate.big_modeling'):
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
    for part in model.modules():
        if hasattr(part, '_hf_hook'):
            _align_forward(part)
    for name in ('to', 'cuda', 'npu', 'mlu', 'musa', 'sdaa', 'neuron', 'xpu'):
        # Remove accelerate's instance methods: they only warn, and on a deepcopy they act on the
        # original model.
        vars(model).pop(name, None)
    vars(model)['_apply'] = functools.partial(_apply_in_place, model)
    align_methods(model, plan)
    for part in model.modules():
        vars(part)['_dispatched'] = True
    vars(model).update(device_plan=plan, device_ties=tied_names(named_tensors(model)))
    return model


def _check_present(devices: Sequence[str]) -> None:
    """Refuse devices that hold no tensor, with what is present."""
    for name in devices:
        try:
            torch.ones(1, device=name)
        except Exception as error:  # a vendor's package may raise anything
            counts = {
                each: get_accelerator(each).device_count() for each in available_accelerators()
            }
            kind = name.partition(':')[0]
            package = f', or import the package that brings {kind} first, e.g. torch_{kind}'
            hint = '' if kind == 'cuda' else package
            present = ', '.join(f'{each} ({count})' for each, count in counts.items())
            raise PlacementError(
                f'the device {name} of the plan is not there '
                f'({type(error).__name__}: {first_line(error)}); present are: {present}. Plan for '
                f'these{hint}.'
            ) from error


def _check_ranks() -> None:
    """Refuse a job of several ranks in which accelerate takes each for the only one."""
    from accelerate import PartialState
    from accelerate.state import AcceleratorState

    state, world = PartialState._shared_state, int(os.environ.get('WORLD_SIZE', 1))
    if world == 1 or state.get('num_processes', world) > 1:
        return
    message = (
        f'accelerate sees num_processes=1, but WORLD_SIZE={world}: each rank trains a model '
        f'by itself, and nothing averages their gradients. Set '
        f'ACCELERATE_BYPASS_DEVICE_MAP=true and make Accelerator(cpu=True), or wrap '
        f'the model in DistributedDataParallel.'
    )
    if AcceleratorState._shared_state:  # an Accelerator was made, not only its logger
        raise PlacementError(message)
    warnings.warn(message, stacklevel=3)


def _apply_in_place(
    model: Any, fn: Callable[[torch.Tensor], torch.Tensor], *args: object, **options: object
) -> nn.Module:
    """Do what ``nn.Module._apply`` does, which every ``to`` calls, and refuse a move."""
    for name in model.device_plan.devices:
        planned = torch.device(name)
        found = fn(torch.empty(0, device=planned)).device
        if not same_device(found, planned):
            raise PlacementError(
                f'a move of {type(model).__name__}, or of a module that holds it, from {name} to '
                f'{found}: dispatch() has spread it over {", ".join(model.device_plan.devices)}, '
                f'where its parts send their inputs, and tied weights would come apart. Remove '
                f'the call of to(), cpu() or cuda(). Where a trainer moves its submodules, as '
                f'Lightning does, keep the model out of them: self.held = [model], and save it in '
                f'on_save_checkpoint.'
            )
    return type(model)._apply(model, fn, *args, **options)


def _align_forward(module: Any) -> None:
    """Have the caller's arguments get what accelerate's hook lets a module write into copies."""
    hook = module._hf_hook
    move = functools.partial(type(hook).pre_forward, hook)
    module._old_forward = functools.partial(_forward_there, module, move, module._old_forward)
    hook.pre_forward = _leave_arguments


def _leave_arguments(_: nn.Module, *args: object, **kwargs: object) -> Tuple[tuple, dict]:
    return args, kwargs


def _forward_there(
    module: nn.Module, move: Callable, forward: Callable, *args: object, **kwargs: object
) -> object:
    there, named = move(module, *args, **kwargs)
    with writing_back((args, kwargs), (there, named)):
        return forward(*there, **named)


def align_methods(model: nn.Module, plan: DevicePlan) -> None:
    """Make other methods of modules that are on one device move their arguments there, too."""
    for module, device in _whole_modules(model, plan):
        for method in METHODS:
            if callable(getattr(type(module), method, None)) and method not in vars(module):
                there = functools.partial(_call_there, module, method, device)
                setattr(module, method, there)


def _call_there(
    module: nn.Module, method: str, device: torch.device, *args: object, **kwargs: object
) -> object:
    from accelerate.utils import send_to_device

    there, named = send_to_device(args, device), send_to_device(kwargs, device)
    # No bound method: a deepcopy of the module would call the original.
    with writing_back((args, kwargs), (there, named)):
        return getattr(type(module), method)(module, *there, **named)


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
