"""Check that everything is on this rank's device."""

from typing import Dict, List, Sequence

import torch
from mmengine.hooks import Hook
from mmengine.optim import OptimWrapper
from mmengine.registry import HOOKS
from torch import Tensor
from torch.optim import Optimizer

from mmdevplug.accelerators import context_of
from mmdevplug.data.endless import check_endless
from mmdevplug.model.move import describe_misplaced, misplaced_tensors, move_module, same_device
from mmdevplug.model.placement import placement_of
from mmdevplug.utils.annotations import AnyRunner
from mmdevplug.utils.model import list_optim_wrappers, unwrap_model


@HOOKS.register_module()
class DeviceHook(Hook):
    """Check devices before a run, and that loops over epochs have data that ends."""

    priority = 'HIGHEST'

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
        devices = context_of(runner).devices
        device = devices[0]
        model = unwrap_model(runner.model)
        # A wrapper that has not been built yet is a config.
        optimizers: List[Optimizer] = []
        for wrapper in list_optim_wrappers(runner.optim_wrapper):
            if isinstance(wrapper, OptimWrapper):
                optimizers.append(wrapper.optimizer)
        misplaced = {**misplaced_tensors(model, device), **_misplaced_state(optimizers, devices)}
        if misplaced:
            runner.logger.warning(
                f'not on {device}, the device of rank {runner.rank}: '
                f'{describe_misplaced(misplaced)}. Moved there.'
            )
            move_module(model, device)
            for optimizer in optimizers:
                for parameter, state in optimizer.state.items():
                    target = _place_of_state(parameter, devices)
                    for name, value in state.items():
                        if _belongs_on_device(value):
                            state[name] = value.to(target)

    def before_train(self, runner: AnyRunner) -> None:
        """Leave NaN to a gradient scaler, if there is one."""
        # A repository's wrapper may have a `train_step` that does not call ours.
        follow_scaler = getattr(runner.model, 'follow_scaler', None)
        if follow_scaler is not None:
            follow_scaler(runner.optim_wrapper)


def _belongs_on_device(value: object) -> bool:
    # Adam and its kin count steps in a tensor without dimensions, on the host by design.
    return isinstance(value, Tensor) and value.dim() > 0


def _place_of_state(parameter: Tensor, devices: Sequence[torch.device]) -> torch.device:
    """Where the state of a parameter belongs: beside it, if the model is over several devices."""
    return parameter.device if len(devices) > 1 else devices[0]


def _misplaced_state(
    optimizers: List[Optimizer], devices: Sequence[torch.device]
) -> Dict[str, torch.device]:
    misplaced = {}
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        for index, (parameter, state) in enumerate(optimizer.state.items()):
            expected = _place_of_state(parameter, devices)
            for name, value in state.items():
                if _belongs_on_device(value) and not same_device(value.device, expected):
                    misplaced[f'{kind} state {name} of parameter {index}'] = value.device
        for number, group in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(group['params']):
                if not any(same_device(parameter.device, device) for device in devices):
                    misplaced[f'{kind} parameter {index} of group {number}'] = parameter.device
    return misplaced
