"""Compare a training step on a device with the same step on the CPU, module by module."""

import copy
import random
from contextlib import contextmanager, nullcontext
from typing import ContextManager, Iterator, List, Optional, Tuple, Union

import numpy as np
import torch
from mmengine.model import BaseModel
from mmengine.registry import MODELS, DefaultScope
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from mmdevplug.errors import first_line
from mmdevplug.runner import DeviceRunner
from mmdevplug.utils.annotations import AnyConfig
from mmdevplug.utils.model import list_optim_wrappers, unwrap_model
from mmdevplug.utils.torch_compat import DISPATCH_MODES

from .findings import Finding, Section
from .host_draws import HostDraws
from .operators import ROUNDING, TOLERANCE, TOLERANCE_OF_HALF, OperatorComparison, Place
from .records import Difference, Found, Record, find_difference, is_like, tensors_of

section = Section('numbers')
#: How far weights are moved where a difference was found, and how often: torch_xla adds up a mean
#: of 4096 values with an error of 6e-6, and a ReLU may pass the gradient of a value near zero.
COARSE_ROUNDING, MOVES = 1e-5, 5
WHY = 'the training would learn something else.'
WHY_UNSURE = (
    'another seed changes it as much, so rounding may decide which random numbers are used, or '
    f'the device may draw some itself; if not, {WHY}'
)
REMEDY = (
    'Write it by other operators, and report it to the vendor of the device; where the difference '
    'is meant, leave the comparison out'
)


def compare_step(runner: DeviceRunner, batch: object) -> List[Finding]:
    """Compare one step of a runner's model with that of a new model on the CPU.

    The model on the CPU gets the same weights, batch and random numbers. A third step, there, with
    weights moved by rounding, shows what is sensitive, which no difference counts of. Where one
    is found, there are more of these: rounding lets a ReLU pass a gradient or not. If it stays,
    another step on the device looks for the operator. A difference is an error unless steps with
    other seeds differ as much: a choice among random numbers may follow from rounding. The
    numbers of a lazy device are its own, so that seeds differ in all these steps.

    Args:
        runner (DeviceRunner): Built, with its optimizer wrapper; in one process.
        batch (any): What its data loader gives; it is not changed.
    """
    device, model = runner.device_context.device, runner.model
    if device.type == 'cpu':
        return []
    unlike = _why_not(runner)
    if unlike is None:
        try:
            # None in new-style configs, which hold classes.
            scope = getattr(runner.default_scope, 'scope_name', None)
            with DefaultScope.overwrite_default_scope(scope):
                hosts = [MODELS.build(_config_of(runner)) for _ in range(2)]
            state = ModelState(model)
            for host in hosts:
                state.load(host)
            here = _step(hosts[0], batch, None)
            shared = _shares_draws(runner)
            spreads = [_step(hosts[1], batch, None, 1, seed=0 if shared else 1)]
        except Exception as error:
            # Whatever the model raises on the CPU alone.
            unlike = f'the step fails on the CPU: {first_line(error)}'
    if unlike is not None:
        return [section.note(f'not compared with the CPU: {unlike}')]
    try:
        there = _step(model, batch, runner)
    except Exception as error:  # with its place where the training comes to it
        unlike = f'the step fails on {device}: {first_line(error)}'
        return [section.note(f'not compared with the CPU: {unlike}')]
    casts = [
        each for each in list_optim_wrappers(runner.optim_wrapper) if hasattr(each, 'cast_dtype')
    ]
    tolerance = TOLERANCE_OF_HALF if casts else TOLERANCE
    # Of the lowest precision: any device may cast to bfloat16 where none is named.
    dtypes = [each.cast_dtype or torch.bfloat16 for each in casts]
    rounding = max([COARSE_ROUNDING, *(torch.finfo(dtype).eps / 2 for dtype in dtypes)])
    found = find_difference(there, here, spreads, tolerance, str(device))

    def find_again(number: int, seed: int) -> Optional[Found]:
        state.load(hosts[1])
        spreads.append(_step(hosts[1], batch, None, number, seed, rounding))
        return find_difference(there, here, spreads, tolerance, str(device))

    for number in range(2, MOVES + 2):
        if found is not None:
            found = find_again(number, seed=0 if shared else number)
    if found is None:
        outputs = {
            key for key, one in here.outputs.items() if is_like(there.outputs.get(key), one)
        }
        modules = {name for name, _, _ in outputs} & set(here.kinds)
        return [section.ok(f'outputs and gradients of {len(modules)} modules as on the CPU')]
    said = found.text + _name_operator(runner, batch, found.place)
    if shared and here.drew:
        for number in range(2, MOVES + 2):
            if find_again(number, seed=number) is None:
                return [section.warning(said, WHY_UNSURE, REMEDY)]
    return [section.error(said, WHY, REMEDY)]


def _shares_draws(runner: DeviceRunner) -> bool:
    """Whether a step on the device gets the random numbers of the host."""
    return DISPATCH_MODES and not runner.device_context.accelerator.compilation.lazy


def _name_operator(runner: DeviceRunner, batch: object, place: Place) -> str:
    """Compare the operators at a place of one more step; what is added to the message."""
    if not DISPATCH_MODES:
        return ''
    device = runner.device_context.device
    operators = OperatorComparison(device.type, place)
    try:
        _compute(runner.model, batch, runner, operators)
    except Exception as error:  # of an operator that no mode may see
        return f'; its operators cannot be compared one by one: {first_line(error)}'
    finally:
        runner.model.zero_grad()
    if operators.first is not None:
        name, there, here = operators.first
        told = Difference(name, there, here).told(str(device))
        return f'; the first operator that differs from the same operands: {name}, {told}'
    if not operators.compared:
        return ''
    return (
        f'; each of its {operators.compared} operators alone computes what the CPU does: '
        f'rounding, the compiler, or code that asks for the device makes the difference'
    )


def _why_not(runner: DeviceRunner) -> Optional[str]:
    model = runner.model
    if not (runner.placement.whole and runner.placement.one_device):
        return 'the model is spread over several devices.'
    if unwrap_model(model) is not model or not isinstance(model, BaseModel):
        return f'{type(model).__name__} is no model of MMEngine.'
    if getattr(type(model), 'train_step', None) is not BaseModel.train_step:
        return f'{type(model).__name__} has a train_step() of its own.'
    if not isinstance(runner.cfg.get('model'), dict):
        return 'the config has no model that can be built again.'
    return None


def _config_of(runner: DeviceRunner) -> Optional[AnyConfig]:
    config = copy.deepcopy(runner.cfg.model)
    if runner.cfg.get('data_preprocessor') is not None:  # as MMEngine's runner
        config.setdefault('data_preprocessor', copy.deepcopy(runner.cfg.data_preprocessor))
    return config


class ModelState:
    """All weights, buffers and other state of a model, on the host.

    A ``state_dict()`` lacks some buffers, which a constructor may draw, and one of the user's may
    lack weights, such as frozen ones.
    """

    def __init__(self, model: nn.Module) -> None:
        self._states = {name: _on_host(each) for name, each in model.state_dict().items()}
        self._tensors = {name: each.detach().cpu() for name, each in tensors_of(model)}

    @torch.no_grad()
    def load(self, model: nn.Module) -> None:
        """Give it to another model of the same config."""
        model.load_state_dict(self._states, strict=False)
        for name, tensor in tensors_of(model):
            value = self._tensors.get(name)
            if value is not None and value.shape == tensor.shape:
                tensor.copy_(value)


def _on_host(value: object) -> object:
    return value.detach().cpu() if isinstance(value, Tensor) else value


def _step(
    model: BaseModel,
    batch: object,
    runner: Optional[DeviceRunner],
    moved: int = 0,
    seed: int = 0,
    rounding: float = ROUNDING,
) -> Record:
    """Record losses and gradients; on the CPU if there is no runner.

    ``moved`` is not 0 if weights are moved by rounding: a seed.
    """
    record = Record()
    loss, scale = _compute(model, batch, runner, record, moved, seed, rounding)
    undrawn = torch.Generator().manual_seed(seed).get_state()
    record.drew = not torch.equal(torch.get_rng_state(), undrawn)
    record.outputs['the loss', 1, 0] = loss.detach().flatten().float()
    record.finish(model, scale)
    model.zero_grad()
    return record


def _compute(
    model: BaseModel,
    batch: object,
    runner: Optional[DeviceRunner],
    watcher: Union[Record, OperatorComparison],
    moved: int = 0,
    seed: int = 0,
    rounding: float = ROUNDING,
) -> Tuple[Tensor, float]:
    """Compute losses and gradients while a watcher follows; return the loss and its scale."""
    batch = copy.deepcopy(batch)
    # What the host draws, such as the size of a batch, is equal on all devices.
    random.seed(0)
    np.random.seed(0)
    model.train()
    model.zero_grad()
    if moved:
        torch.manual_seed(moved)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + rounding * torch.randn_like(parameter))
    wrapper = None if runner is None else next(iter(list_optim_wrappers(runner.optim_wrapper)))
    scaler = getattr(wrapper, 'loss_scaler', None)
    scale = 1.0 if scaler is None else float(scaler.get_scale())
    torch.manual_seed(seed)
    with _drawing_on_host(runner), _without_dropout(model), watcher.watching(model):
        with nullcontext() if wrapper is None else wrapper.optim_context(model):
            losses = model._run_forward(model.data_preprocessor(batch, True), mode='loss')
            loss = model.parse_losses(losses)[0]
        watcher.begin_backward()
        (loss * scale).backward()
    if runner is not None:
        runner.device_context.materialize()
    return loss, scale


def _drawing_on_host(runner: Optional[DeviceRunner]) -> ContextManager[object]:
    if runner is None or not _shares_draws(runner):
        return nullcontext()
    return HostDraws(runner.device_context.device.type)


@contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    """Draw nothing in layers that drop values: each device draws otherwise."""
    before: List[Tuple[nn.Module, str, object]] = []
    for module in model.modules():
        if isinstance(module, _DropoutNd) or type(module).__name__.startswith('Drop'):
            before.append((module, 'training', module.training))
            module.training = False
        elif isinstance(getattr(module, 'dropout', None), float):  # attention
            before.append((module, 'dropout', module.dropout))
            vars(module)['dropout'] = 0.0
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
