"""Set learning rates for iterations of another number of samples."""

import copy
from typing import Any, List, Mapping, Sequence

from mmengine.optim import ReduceOnPlateauParamScheduler
from mmengine.runner import EpochBasedTrainLoop

from mmdevplug.utils.model import list_optim_wrappers


def scale_lr(optim_wrapper: Any, factor: float) -> None:
    """Multiply the learning rates of an optimizer wrapper."""
    for wrapper in list_optim_wrappers(optim_wrapper):
        for group in wrapper.optimizer.param_groups:
            group['lr'] = group['lr'] * factor


def learning_rates(optim_wrapper: Any) -> List[List[float]]:
    """Return the learning rate of each group of parameters of each optimizer."""
    return [
        [group['lr'] for group in wrapper.optimizer.param_groups]
        for wrapper in list_optim_wrappers(optim_wrapper)
    ]


def _flatten(schedulers: Any) -> List[Any]:
    if schedulers is None:
        return []
    lists = schedulers.values() if isinstance(schedulers, Mapping) else [schedulers]
    return [scheduler for each in lists for scheduler in each]


def replay_schedulers(runner: Any, rates: List[List[float]], config: Any) -> bool:
    """Build the schedulers again, and step them to where training is.

    An epoch has another number of iterations than when they were saved. Schedulers that follow a
    metric cannot be stepped again: with one of them, learning rates are multiplied.

    Args:
        runner (Runner): Its loop is where training goes on.
        rates (list[list[float]]): Of the optimizers, before any scheduler was built.
        config: Of the schedulers.

    Returns:
        bool: Whether they were stepped.
    """
    wrappers = list_optim_wrappers(runner.optim_wrapper)
    groups = [group for wrapper in wrappers for group in wrapper.optimizer.param_groups]
    flat = [rate for each in rates for rate in each]
    metric = [
        one
        for one in _flatten(runner.param_schedulers)
        if isinstance(one, ReduceOnPlateauParamScheduler)
    ]
    if metric:
        factors = [rate / (group.get('initial_lr') or rate) for group, rate in zip(groups, flat)]
        for group, factor, rate in zip(groups, factors, flat):
            group['lr'], group['initial_lr'] = group['lr'] * factor, rate
        return False
    for group, rate in zip(groups, flat):
        for name in [name for name in group if name.startswith('initial_')]:
            group[name[len('initial_') :]] = group.pop(name)
        group['lr'] = rate
    runner.param_schedulers = runner.build_param_scheduler(copy.deepcopy(config))
    schedulers = _flatten(runner.param_schedulers)
    by_epoch = [one for one in schedulers if one.by_epoch]
    by_iteration = [one for one in schedulers if not one.by_epoch]
    done = 0
    if isinstance(runner.train_loop, EpochBasedTrainLoop):
        length = len(runner.train_dataloader)
        for _ in range(runner.epoch):
            _step(by_iteration, length)
            _step(by_epoch, 1)
        done = runner.epoch * length
    _step(by_iteration, runner.iter - done)
    return True


def _step(schedulers: Sequence[Any], times: int) -> None:
    for _ in range(times):
        for scheduler in schedulers:
            # PyTorch's order of calls does not hold: the optimizer's steps were done before.
            scheduler.optimizer._global_step += 1
            scheduler.step()
