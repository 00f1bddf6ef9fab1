"""Section *config*: start as ``mmdevplug train`` does, train one step, and validate one."""

import os
import sys
import tempfile
import traceback
from contextlib import contextmanager, nullcontext, redirect_stdout
from functools import partial
from typing import Iterator, List, NamedTuple, NoReturn, Tuple

import torch
from mmengine.config import Config
from mmengine.hooks import Hook, RuntimeInfoHook
from mmengine.registry import RUNNERS
from mmengine.runner.loops import _InfiniteDataloaderIterator
from torch import nn

from mmdevplug.accelerators import devices_of
from mmdevplug.data.resumable_loader import ResumableLoader
from mmdevplug.device_guard import DeviceGuard
from mmdevplug.device_guard.explain import describe_place
from mmdevplug.device_guard.mode import HAS_MODES
from mmdevplug.errors import DevPlugError, first_line
from mmdevplug.gradients.unused_parameters import REMEDY, describe_unused, listing_unused
from mmdevplug.model.move import (
    describe_misplaced,
    misplaced_by_plan,
    misplaced_tensors,
    same_device,
)
from mmdevplug.runner import DeviceRunner
from mmdevplug.runner.explain_errors import explained
from mmdevplug.utils.annotations import AnyLoop, AnyOptimWrapper
from mmdevplug.utils.loops import loaders_of
from mmdevplug.utils.model import list_optim_wrappers
from mmdevplug.utils.pytree import tensors_in

from .comparison import compare_step
from .findings import Finding, Section, exit_status

section = Section('config')
_WHY = 'a training stops or computes something else there.'


class Step(NamedTuple):
    """What one training step showed."""

    devices: str  # of this process
    moved: str  # what the guard reports of operands on several devices
    findings: List[Finding]


def train_one_step(cfg: Config, policy: str = 'error', compare: bool = True) -> Step:
    """Build everything that a training builds, and train one step.

    Nothing is loaded, and nothing is written but a temporary folder. Weights, which may have to be
    downloaded, are not initialized.

    Args:
        cfg (Config): As ``load_config`` returns it; changed in place.
        policy (str): What the guard does with an operation that mixes devices. Defaults to
            ``'error'``.
        compare (bool): Compare the step with one on the CPU first. Defaults to True.

    Raises:
        DevPlugError: If the training would be refused before its first step.
    """
    with _built(cfg) as (runner, batch):
        guard = DeviceGuard(policy=policy, model=runner.model) if HAS_MODES else None
        findings: List[Finding] = []
        if guard is None:
            said = (
                f'torch {torch.__version__} cannot look at single operations; 1.13 and later can'
            )
            findings.append(section.note(said, 'the devices of weights are looked at.'))
        if compare:
            with _noting(findings, runner, 'train', 'the step'):
                findings += compare_step(runner, batch)
        with listing_unused(runner.model) as unused:
            with _noting(findings, runner, 'train', 'the step'), guard or nullcontext():
                runner.model.train_step(batch, optim_wrapper=runner.optim_wrapper)
                runner.device_context.materialize()
                findings += _unused(unused(), runner)
        if runner.val_loop is not None and exit_status(findings) == 0:
            with _noting(findings, runner, 'val', 'the validation step'), guard or nullcontext():
                findings += _validate(runner)
        sites = guard is not None and guard.sites
        if policy == 'warn' and sites:
            said = 'operations got operands of different devices; see above'
            findings.append(section.error(said, _WHY))
        wrong = [*_misplaced(runner), *_apart(runner.model, runner.optim_wrapper)]
        findings += [section.error(found, _WHY) for found in wrong]
        moved = guard.report() if guard is not None and policy != 'error' and sites else ''
        devices = ', '.join(map(str, runner.device_context.devices))
        return Step(devices, moved, findings)


def compare_with_cpu(cfg: Config) -> List[Finding]:
    """Compare one training step with one on the CPU; see :func:`train_one_step`."""
    with _built(cfg) as (runner, batch):
        return compare_step(runner, batch)


@contextmanager
def _built(cfg: Config) -> Iterator[Tuple[DeviceRunner, object]]:
    for key in ('resume', 'load_from'):
        cfg.pop(key, None)
    if isinstance(cfg.get('visualizer'), dict):
        cfg.visualizer.vis_backends = None  # which write elsewhere; hooks may ask for its class
    cfg.log_level = 'WARNING'
    with tempfile.TemporaryDirectory() as cfg.work_dir, redirect_stdout(sys.stderr):
        # Runners of one name that are built in the same second share a visualizer and its folder.
        cfg.experiment_name = os.path.basename(cfg.work_dir)
        runner = RUNNERS.build(cfg)
        _check_runner(runner)
        with explained(runner, 'train'):
            batch = _prepare(runner)
        yield runner, batch


@contextmanager
def _noting(
    findings: List[Finding], runner: DeviceRunner, stage: str, what: str
) -> Iterator[None]:
    try:
        with explained(runner, stage):
            yield
    except DevPlugError as error:
        findings.append(section.error(str(error), _WHY))
    except Exception as error:
        # Whatever the model raises is what the user has to see.
        traceback.print_exc()
        said = f'{what} fails with {type(error).__name__}: {first_line(error)}'
        findings.append(section.error(said + describe_place(error, runner.model), _WHY))


class _OneBatch(Hook):
    """Ends a validation after its first batch."""

    class End(Exception):
        """Raised then."""

    def after_val_iter(self, *_: object, **__: object) -> None:
        """End it."""
        raise self.End


def _validate(runner: DeviceRunner) -> List[Finding]:
    """Validate one batch, without hooks; the metrics of one batch may fail where all would not."""
    loop, runner._hooks = runner.val_loop, [_OneBatch()]
    try:
        loop.run()
    except _OneBatch.End:
        runner.device_context.materialize()
    evaluator = getattr(loop, 'evaluator', None)
    try:
        if evaluator is not None:
            evaluator.evaluate(len(loop.dataloader.dataset))
    except Exception as error:
        said = f'the metrics of one batch fail with {type(error).__name__}: {first_line(error)}'
        return [section.warning(said, 'some need all batches; if not, validation ends there.')]
    return [section.ok('one validation step')]


def _check_runner(runner: object) -> None:
    if not isinstance(runner, DeviceRunner):
        raise DevPlugError(
            f'runner_type={type(runner).__name__!r} ignores the device keys or trains by a '
            f"strategy; one step can be checked with runner_type='DeviceRunner'."
        )
    if runner._train_dataloader is None:
        raise DevPlugError(
            'the config has no train_dataloader, so that there is no training step to look at. '
            'Add train_dataloader, train_cfg and optim_wrapper.'
        )


def _prepare(runner: DeviceRunner) -> object:
    """Build what :meth:`DeviceRunner.train` builds, in its order; return the first batch."""
    runner._train_loop = runner.build_train_loop(runner._train_loop)
    runner.optim_wrapper = runner.build_optim_wrapper(runner.optim_wrapper)
    if (runner.auto_scale_lr or {}).get('enable'):  # else it speaks of this number of ranks
        runner.scale_lr(runner.optim_wrapper, runner.auto_scale_lr)
    if runner.param_schedulers is not None:
        runner.param_schedulers = runner.build_param_scheduler(runner.param_schedulers)
    if runner._val_loop is not None:
        runner._val_loop = runner.build_val_loop(runner._val_loop)
    runner.optim_wrapper.initialize_count_status(runner.model, 0, 1)
    for hook in runner.hooks:
        if isinstance(hook, RuntimeInfoHook):  # a model may read the length of the training
            hook.before_run(runner)
            hook.before_train(runner)
    batch = _first_batch(runner)
    runner.model.train()
    return batch


class _TrainingStarts(Exception):
    """Ends a training loop before its first step."""


def _first_batch(runner: DeviceRunner) -> object:
    """Let the training loop give the model its first batch, which is not trained on.

    A loop of the user's may join the batches of several loaders, or train by other means than
    ``train_step()``; then it is the first batch of the runner's loader.
    """
    loop, model, batches = runner.train_loop, runner.model, []

    def train_step(batch: object, *_: object, **__: object) -> NoReturn:
        batches.append(batch)
        raise _TrainingStarts

    hooks, runner._hooks = runner._hooks, []
    model.train_step = train_step
    try:
        with _reading_once(loop):
            loop.run()
    except _TrainingStarts:
        pass
    finally:
        del model.train_step
        runner._hooks = hooks
    if batches:
        return batches[0]
    # The loop of iterations has begun to read already, and samplers without end are read once.
    begun = getattr(loop, 'dataloader_iterator', None)
    data = begun if isinstance(begun, _InfiniteDataloaderIterator) else runner.train_dataloader
    return next(iter(data))


@contextmanager
def _reading_once(loop: AnyLoop) -> Iterator[None]:
    """End a loop when it asks a loader for a second batch."""
    loaders = [each for each in loaders_of(loop) if isinstance(each, ResumableLoader)]

    def end() -> NoReturn:
        raise _TrainingStarts

    for loader in loaders:
        loader.before_next = partial(setattr, loader, 'before_next', end)
    try:
        yield
    finally:
        for loader in loaders:
            loader.before_next = None


def _unused(names: List[str], runner: DeviceRunner) -> List[Finding]:
    accelerator = runner.device_context.accelerator
    found = describe_unused(names, runner.cfg, accelerator, 'A job of several ranks')
    why = f'if that is meant, {REMEDY}.'
    return [section.warning(found, why, 'find_unused_parameters = True')] if found else []


def _misplaced(runner: DeviceRunner) -> List[str]:
    plan, device = getattr(runner.placement, 'plan', None), runner.device_context.device
    if plan is not None:
        return [
            f'{name} is on {tensor.device}, but planned on {planned}'
            for name, tensor, planned in misplaced_by_plan(runner.model, plan)
        ]
    found = misplaced_tensors(runner.model, device)
    return [f'not on {device}: {describe_misplaced(found)}'] if found else []


def _apart(model: nn.Module, optim_wrapper: AnyOptimWrapper) -> Iterator[str]:
    """Describe tensors that have to be on one device and are not, in one line each."""
    for name, module in model.named_modules():
        own = devices_of([*module.parameters(recurse=False), *module.buffers(recurse=False)])
        if len(own) > 1:
            devices = ', '.join(map(str, own))
            yield f'{name or type(module).__name__} has tensors of its own on {devices}'
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for wrapper in list_optim_wrappers(optim_wrapper):
        for parameter, state in wrapper.optimizer.state.items():
            # Scalars are on the host by design.
            for device in devices_of(each for each in tensors_in(state) if each.dim()):
                if not same_device(device, parameter.device):
                    name = names.get(id(parameter), 'a parameter')
                    yield f'{name} is on {parameter.device}, but its optimizer state on {device}'
