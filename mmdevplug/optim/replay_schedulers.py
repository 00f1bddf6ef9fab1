"""Set the parameters of optimizers to what schedulers give after the steps that are done."""

from typing import Any, Dict, List, NamedTuple, Sequence

from mmdevplug.utils.annotations import AnyOptimWrapper


class Past(NamedTuple):
    """The training before a resumption."""

    #: Epochs that are done; 0 in a loop over iterations.
    epochs: int
    #: Iterations that are done.
    iterations: int
    #: Iterations of an epoch, when they were done.
    length: int


def param_groups(wrapper: AnyOptimWrapper) -> List[Dict[str, Any]]:
    """List what schedulers change: groups, and the settings that MMEngine logs with several."""
    base = getattr(wrapper, 'base_param_settings', None)
    return wrapper.optimizer.param_groups + ([] if base is None else [base])


def base_name(name: str) -> str:
    """The key of a group that holds the value of a scheduled parameter before any step."""
    return f'initial_{name}'


def restart_schedulers(wrapper: AnyOptimWrapper, schedulers: Sequence[Any]) -> None:
    """Set groups and schedulers to where they are when schedulers are built."""
    groups = param_groups(wrapper)
    for group in groups:
        for name in [each for each in group if base_name(each) in group]:
            group[name] = group[base_name(name)]
    for scheduler in schedulers:
        scheduler.last_step = -1
        scheduler.base_values = [group[base_name(scheduler.param_name)] for group in groups]
        if follows_metric(scheduler):
            scheduler._global_step = 0
            continue
        scheduler._global_step = -1
        scheduler.step()


def follows_metric(scheduler: object) -> bool:
    """Whether the past of a scheduler cannot be repeated, because it depends on results."""
    return bool(getattr(scheduler, 'need_val_args', False))


def replay_schedulers(
    schedulers: Sequence[Any], past: Past, length: int, converted: Sequence[bool]
) -> None:
    """Step schedulers that are where they were built through the training before.

    Args:
        schedulers (list): Of one optimizer.
        past (Past): The steps.
        length (int): Iterations of an epoch from now on.
        converted (list[bool]): By scheduler, whether MMEngine has made its iterations of epochs
            of ``length``.
    """
    by_epoch = [one for one in schedulers if one.by_epoch]
    counted = list(zip(schedulers, converted))

    def iterate(iterations: int, of_converted: int) -> None:
        for number in range(max(iterations, of_converted)):
            for scheduler, is_converted in counted:
                if not scheduler.by_epoch and number < (
                    of_converted if is_converted else iterations
                ):
                    _step(scheduler)

    for _ in range(past.epochs):
        iterate(past.length, length)
        for scheduler in by_epoch:
            _step(scheduler)
    rest = max(0, past.iterations - past.epochs * past.length)
    iterate(rest, rest * length // past.length)


def _step(scheduler: Any) -> None:
    # PyTorch's order of calls does not hold: the optimizer's steps were done before.
    scheduler.optimizer._global_step += 1
    scheduler.step()
