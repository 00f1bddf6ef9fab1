"""Compare the types of what a checkpoint holds with those of what this run has in its place."""

from typing import Dict, List, Mapping, Sequence

from mmengine.logging import HistoryBuffer, MessageHub
from torch import Tensor

from mmdevplug.utils.annotations import AnyRunner, AnyScheduler, SavedState, StateDict
from mmdevplug.utils.state_types import Maybe

from .refusals import refuse_other_types

#: Keys of ``meta`` and ``message_hub`` that resuming reads, and their types.
_META = dict(
    **dict(epoch=0, iter=0, seed=Maybe(0), cfg='', experiment_name='', dataset_meta={}, job=''),
    **dict(counts_epochs=False, kinds={}),
)
_COUNTS = dict(epoch=0, iter=0, max_epochs=0, max_iters=0)
_HUB = dict(log_scalars={}, runtime_info=_COUNTS, resumed_keys={})


def check_types(runner: AnyRunner, checkpoint: SavedState, filename: str) -> None:
    """Refuse a checkpoint to resume from in which something is of another type than here.

    Args:
        runner (Runner): Whose optimizers and schedulers are built.
        checkpoint (dict): What was read.
        filename (str): Of which file.

    Raises:
        CheckpointError: With the key, its value and what is expected.
    """
    optimizer = _of_optimizers(runner.optim_wrapper.state_dict(), checkpoint.get('optimizer'))
    expected: StateDict = dict(meta=_META, message_hub=_HUB, optimizer=optimizer)
    schedulers = runner.param_schedulers
    if isinstance(schedulers, dict):
        expected['param_schedulers'] = {k: _states(each) for k, each in schedulers.items()}
    elif schedulers:
        expected['param_schedulers'] = _states(schedulers)
    given = {name: checkpoint[name] for name in expected if name in checkpoint}
    if isinstance(given.get('message_hub'), MessageHub):
        del given['message_hub']  # MMEngine's first releases saved it in another form
    refuse_other_types(given, expected, filename)
    hub, kinds = given.get('message_hub', {}), given.get('meta', {}).get('kinds', {})
    known = dict(
        resumed_keys=dict.fromkeys(hub.get('resumed_keys', ()), True),
        log_scalars=dict.fromkeys(hub.get('log_scalars', ()), HistoryBuffer()),
    )
    refuse_other_types(hub, known, filename, 'message_hub')
    refuse_other_types(kinds, dict.fromkeys(kinds, dict(parameters=[])), filename, 'meta.kinds')
    for name, each in kinds.items():
        like = dict(parameters=[''] * len(each.get('parameters', ())))
        refuse_other_types(each, like, filename, f'meta.kinds.{name}')


def _of_optimizers(state: object, found: object) -> object:
    """What a state of optimizers consists of; what parameters have, each has as most do."""
    if not isinstance(state, Mapping) or not isinstance(found, Mapping):
        return {}
    if 'param_groups' not in state:
        return {name: _of_optimizers(each, found.get(name)) for name, each in state.items()}
    states = found.get('state')
    states = states if isinstance(states, Mapping) else {}
    of_all: Dict[object, object] = {}
    for each in states.values():
        for name, value in each.items() if isinstance(each, Mapping) else ():
            if isinstance(value, Tensor):
                of_all.setdefault(name, value)
    # How a step is computed may be left open.
    groups = [
        {n: Maybe(each) if type(each) is bool else each for n, each in _any_numbers(group).items()}
        for group in state['param_groups']
    ]
    return dict(state, param_groups=groups, state=dict.fromkeys(states, of_all))


def _states(schedulers: Sequence[AnyScheduler]) -> List[StateDict]:
    return [_any_numbers(each.state_dict()) for each in schedulers]


def _any_numbers(state: Mapping[str, object]) -> StateDict:
    """A state whose whole numbers may become others, such as the best value of a metric."""
    return {name: 0.0 if type(value) is int else value for name, value in state.items()}
