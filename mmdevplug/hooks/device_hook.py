"""Check that everything is on this rank's device, and materialize lazy devices."""

import traceback
from typing import Any, Dict, List, Tuple

import torch
from mmengine.hooks import Hook
from mmengine.optim import OptimWrapper
from mmengine.registry import HOOKS
from torch import Tensor, nn
from torch.optim import Optimizer

from mmdevplug.accelerators import rank_device, rank_devices, to_device
from mmdevplug.data.endless import check_endless
from mmdevplug.model.move import describe_misplaced, misplaced_tensors, move_module, same_device
from mmdevplug.model.placement import placement_of
from mmdevplug.utils.annotations import AnyRunner
from mmdevplug.utils.loops import metrics_of
from mmdevplug.utils.model import list_optim_wrappers, unwrap_model


@HOOKS.register_module()
class DeviceHook(Hook):
    """Check devices before a run; materialize after every training iteration on a lazy device.

    It runs before the hooks that read losses, because reading a value that is not materialized
    yet costs one more execution. In validation it copies the results that metrics keep to the
    host, batch by batch.
    """

    priority = 'HIGHEST'

    def __init__(self) -> None:
        self._modes: List[Tuple[nn.Module, bool]] = []
        self._warned_of_eval, self._validating = False, ''
        self._results: List[Tuple[list, int]] = []

    def before_run(self, runner: AnyRunner) -> None:
        """Move what is on another device, with a warning.

        Loops over epochs need data that ends.
        """
        for name in ('train', 'val', 'test'):
            key = f'{name}_dataloader'
            loop, config = getattr(runner, f'_{name}_loop'), getattr(runner, f'_{key}')
            check_endless(loop, key, config, runner.seed)
        if not placement_of(runner).whole:
            return  # sharding has placed each tensor, parameters on the host with `offload`
        _, device = rank_device()
        model = unwrap_model(runner.model)
        # A wrapper that has not been built yet is a config.
        optimizers: List[Optimizer] = []
        for each in list_optim_wrappers(runner.optim_wrapper):
            if isinstance(each, OptimWrapper):
                optimizers.append(each.optimizer)
        found = {**misplaced_tensors(model, device), **_misplaced_state(optimizers, device)}
        if found:
            runner.logger.warning(
                f'not on {device}, the device of rank {runner.rank}: {describe_misplaced(found)}. '
                f'Moved there.'
            )
            move_module(model, device)
            for optimizer in optimizers:
                for parameter, state in optimizer.state.items():
                    place = _place_of_state(parameter, device)
                    for name, value in state.items():
                        if _belongs_on_device(value):
                            state[name] = value.to(place)

    def before_train(self, runner: AnyRunner) -> None:
        """Let optimizer wrappers log gradient norms only at the end of an iteration."""
        self._log_norms(runner)
        # A repository's wrapper may have a `train_step` that does not call ours.
        follow_scaler = getattr(runner.model, 'follow_scaler', None)
        if follow_scaler is not None:
            follow_scaler(runner.optim_wrapper)

    def _log_norms(self, runner: AnyRunner) -> None:
        if rank_device()[0].compilation.lazy:
            from mmdevplug.optim.device_optim_wrapper import log_norms

            log_norms(runner.optim_wrapper)

    def before_train_epoch(self, runner: AnyRunner) -> None:
        """Forget the modes of the last epoch."""
        self._modes = []

    def before_train_iter(self, runner: AnyRunner, *args: object, **kwargs: object) -> None:
        """Return to training mode if a validation inside the epoch has left the model in eval."""
        if self._modes and not unwrap_model(runner.model).training:
            # Not `train()`: parts may be kept in eval mode on purpose.
            for module, training in self._modes:
                module.training = training
            if not self._warned_of_eval:
                self._warned_of_eval = True
                runner.logger.warning(
                    f'The model was in eval mode before iteration {runner.iter + 1}, in the '
                    f'middle of an epoch: {self._validating or "something"} has left it so. '
                    f'Training goes on in training mode. Call runner.model.train() after a '
                    f'validation inside an epoch.'
                )
        elif not self._modes:
            self._note_modes(runner)
        elif not self._warned_of_eval:
            left = [each for each, training in self._modes if training and not each.training]
            if left:
                self._warned_of_eval = True
                names = [name for name, each in runner.model.named_modules() if each in left]
                runner.logger.warning(
                    f'A hook has put {", ".join(names[:8])} ({len(names)} modules) in eval mode '
                    f'before iteration {runner.iter + 1}, in the middle of an epoch. Call their '
                    f'train() after a validation.'
                )

    def before_val(self, runner: AnyRunner) -> None:
        """Note the modes of the model's parts, and which hook validates inside an epoch."""
        self._note_modes(runner)
        self._validating = ''
        for frame, _ in traceback.walk_stack(None):
            caller = frame.f_locals.get('self')
            if isinstance(caller, Hook) and caller is not self:
                self._validating = type(caller).__name__
                break

    before_test = before_val

    def _note_modes(self, runner: AnyRunner) -> None:
        if unwrap_model(runner.model).training:
            self._modes = [(each, each.training) for each in runner.model.modules()]

    def after_train_iter(self, runner: AnyRunner, *args: object, **kwargs: object) -> None:
        """Materialize, also after an iteration that only accumulated gradients."""
        self._note_modes(runner)  # before other hooks can change them
        # Our wrappers do so at the end of their `train_step`, which a user's loop need not call.
        if getattr(runner.model, 'step_materialized', False):
            runner.model.step_materialized = False
        else:
            rank_device()[0].compilation.materialize_all(rank_devices())
        self._log_norms(runner)

    def before_val_iter(self, runner: AnyRunner, *args: object, **kwargs: object) -> None:
        """Note how many results the metrics have."""
        if rank_device()[1].type != 'cpu':
            self._note_results(runner.val_loop)

    def before_test_iter(self, runner: AnyRunner, *args: object, **kwargs: object) -> None:
        """Note how many results the metrics have."""
        if rank_device()[1].type != 'cpu':
            self._note_results(runner.test_loop)

    def _note_results(self, loop: Any) -> None:
        found = [getattr(metric, 'results', None) for metric in metrics_of(loop)]
        self._results = [(each, len(each)) for each in found if isinstance(each, list)]

    def after_val_iter(self, runner: AnyRunner, *args: object, **kwargs: object) -> None:
        """Copy what metrics keep of this batch to the host, in one call.

        MMEngine collects results from all ranks with pickle, which restores a tensor on the device
        that it was on: a device of another rank, which the receiver may not have.
        """
        if self._results:
            new = to_device([results[length:] for results, length in self._results], 'cpu')
            for (results, length), fetched in zip(self._results, new):
                results[length:] = fetched

    after_test_iter = after_val_iter


def _belongs_on_device(value: object) -> bool:
    # Adam and its kin count steps in a tensor without dimensions, on the host by design.
    return isinstance(value, Tensor) and value.dim() > 0


def _place_of_state(parameter: Tensor, device: torch.device) -> torch.device:
    """Where the state of a parameter belongs: beside it, if the model is over several devices."""
    return parameter.device if len(rank_devices()) > 1 else device


def _misplaced_state(optimizers: List[Optimizer], device: torch.device) -> Dict[str, torch.device]:
    found, devices = {}, rank_devices()
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        for index, (parameter, state) in enumerate(optimizer.state.items()):
            place = _place_of_state(parameter, device)
            for name, value in state.items():
                if _belongs_on_device(value) and not same_device(value.device, place):
                    found[f'{kind} state {name} of parameter {index}'] = value.device
        for number, group in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(group['params']):
                for one in devices:
                    if same_device(parameter.device, one):
                        break
                else:
                    found[f'{kind} parameter {index} of group {number}'] = parameter.device
    return found
