"""Decide whether a resumed run has the settings of its checkpoint or those of its config.

MMEngine loads the states of optimizers and schedulers over what the config says, without a word.
Here both are compared before. Where the config's are taken, they are set again afterwards, and its
schedulers, as they were built, step to where training is.
"""

import copy
import inspect
import re
from collections import Counter
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from mmengine.registry import PARAM_SCHEDULERS
from mmengine.runner import EpochBasedTrainLoop
from torch.optim import Optimizer

from mmdevplug.config.fields import shortened
from mmdevplug.utils.annotations import (
    AnyOptimWrapper,
    AnyRunner,
    AnyScheduler,
    SavedState,
    StateDict,
)
from mmdevplug.utils.logs import log_warning
from mmdevplug.utils.loops import length_of, loader_of

from .load_model import check_complete, check_names, check_optimizer, follow_order
from .refusals import refusal
from .saving import by_name, kinds_of, names_in_groups

#: Attributes that MMEngine's schedulers change while they step.
_PROGRESS = {'_global_step', '_last_value', 'base_values', 'last_step', 'verbose'}
_PROGRESS |= {'best', 'cooldown_counter', 'num_bad_epochs'}
#: Those that have a value for each group of parameters.
_OF_GROUPS = {'base_values', '_last_value'}
_MOST = 12  # entries of a message
#: Reasons that decide some settings, whatever ``accelerator.resume_settings`` says.
_LENGTH, _SCALE = 'the length of training', 'auto_scale_lr'
_TAKE_CONFIG = "resume with --resume-settings config (accelerator.resume_settings='config')"

# settings as values -----------------------------------------------------------------------------


class Difference(NamedTuple):
    """A setting that differs between checkpoint and config, and which of the two is taken."""

    name: str
    saved: object
    configured: object
    #: The reason that decides it, if not ``accelerator.resume_settings``.
    because_of: Optional[str] = None
    taken: str = 'config'


def describe(differences: Sequence[Difference]) -> str:
    """List differences; those of several groups of parameters that are equal come once."""
    lines: Dict[str, int] = {}
    for name, saved, configured, because_of, taken in differences:
        why = {taken: f' (taken, as {because_of} says)' if because_of else ' (taken)'}
        values = [
            f'{side} {shortened(value)}{why.get(side, "")}'
            for side, value in (('checkpoint', saved), ('config', configured))
        ]
        line = f'{name}{{}}: {", ".join(values)}'
        lines[line] = lines.get(line, 0) + 1
    texts = [
        line.replace('{}', f' ({count} groups)' if count > 1 else '', 1)
        for line, count in lines.items()
    ]
    more = [f'and {len(texts) - _MOST} more'] if len(texts) > _MOST else []
    return '; '.join(texts[:_MOST] + more)


def plain(value: object) -> Any:
    """Return a setting as what can be compared and shown."""
    if isinstance(value, Counter):
        return sorted(value.elements())
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value.tolist() if hasattr(value, 'tolist') else getattr(value, '__name__', value)


def unscheduled(group: Mapping[str, object]) -> StateDict:
    """Return the values of a group of parameters before any step of a scheduler."""
    values = {
        name: plain(group.get(f'initial_{name}', value))
        for name, value in group.items()
        if not name.startswith('initial_')
    }
    if 'betas' in values and 'momentum' in values:
        # As MMEngine's schedulers of momentum see Adam's.
        values['betas'] = [values.pop('momentum'), *values['betas'][1:]]
    return values


def differing(
    names: Set[str], saved: Mapping[str, object], mine: Mapping[str, object]
) -> List[str]:
    """List those settings that two dicts hold with different values."""
    both = sorted(names & saved.keys() & mine.keys())
    return [name for name in both if plain(saved[name]) != plain(mine[name])]


def group_settings(optimizer: Optimizer, group: Mapping[str, object]) -> Set[str]:
    """Name the settings in a group; the rest are parameters and progress.

    Optimizers such as DAdaptation's and Schedule-Free's count their steps in the groups: in names
    that are not arguments of the class.
    """
    # ZeroRedundancyOptimizer has the groups of the optimizer inside of it.
    known = _arguments(getattr(optimizer, 'optim', optimizer))
    return {name for name in group if name in known or name not in optimizer.defaults} - {'params'}


def scheduler_settings(scheduler: object, state: Mapping[str, object]) -> Set[str]:
    """Name the settings in the state of a scheduler; the rest is how far it has come."""
    # A class of somebody else's may count in names of its own.
    known = type(scheduler).__module__.startswith('mmengine.')
    return (set(state) if known else set(state) & _arguments(scheduler)) - _PROGRESS


def _arguments(instance: object) -> Set[str]:
    makers = [
        vars(kind)['__init__'] for kind in type(instance).__mro__ if '__init__' in vars(kind)
    ]
    return {name for init in makers[:-1] for name in inspect.signature(init).parameters}


# schedules --------------------------------------------------------------------------------------


def replay(
    schedulers: Sequence[AnyScheduler],
    converted: Sequence[bool],
    done: Tuple[int, int],
    epoch: Sequence[int],
) -> None:
    """Step freshly built schedulers up to the resumed epoch and iteration.

    Args:
        schedulers (list): Of one optimizer.
        converted (list[bool]): By scheduler, whether its iterations were made of epochs.
        done (tuple): Epochs, 0 in a loop over iterations, and iterations.
        epoch (tuple): Iterations of an epoch, when they were done and from now on.
    """
    (epochs, iterations), (then, now) = done, epoch
    for scheduler in schedulers:
        # PyTorch's order of calls does not hold: the optimizer's steps were done before.
        scheduler.optimizer._global_step = iterations
    for number in range(epochs + 1):
        steps = then if number < epochs else iterations - epochs * then
        of_converted = steps * now // then
        for step in range(max(steps, of_converted)):
            for scheduler, converts in zip(schedulers, converted):
                if not scheduler.by_epoch and step < (of_converted if converts else steps):
                    scheduler.step()
        for scheduler in schedulers:
            if scheduler.by_epoch and number < epochs:
                scheduler.step()


def param_groups(wrapper: AnyOptimWrapper) -> List[StateDict]:
    """List what schedulers change: groups, and the settings that MMEngine logs with several."""
    base = getattr(wrapper, 'base_param_settings', None)
    return wrapper.optimizer.param_groups + ([] if base is None else [base])


def _schedules_of(checkpoint: SavedState, name: str) -> Sequence[Any]:
    """The states of the schedulers of an optimizer, '' being the only one."""
    states = checkpoint.get('param_schedulers') or []
    return states.get(name, []) if isinstance(states, Mapping) else states


class OptimizerSettings:
    """The settings of one optimizer and its schedulers, as they were built from a config.

    Args:
        name (str): Of the optimizer in an OptimWrapperDict, or ''.
        wrapper (OptimWrapper): It has made no step yet.
        schedulers (list): Of the optimizer.
        config: Of the schedulers: a dict, a list, or what was built before.
    """

    #: Whether settings differ and the config's are taken.
    takes_config = False

    def __init__(
        self, name: str, wrapper: AnyOptimWrapper, schedulers: List[AnyScheduler], config: object
    ) -> None:
        self.name, self.wrapper, self.schedulers = name, wrapper, schedulers
        configs = config if isinstance(config, (list, tuple)) else [config]
        self.configs = [entry if isinstance(entry, Mapping) else {} for entry in configs]
        self.groups = [
            {name: copy.deepcopy(value) for name, value in group.items() if name != 'params'}
            for group in param_groups(wrapper)
        ]
        self.states = [copy.deepcopy(scheduler.state_dict()) for scheduler in self.schedulers]
        self.kinds = kinds_of(wrapper, self.schedulers)
        self._follows_metric = any(getattr(s, 'need_val_args', False) for s in self.schedulers)

    def compare(
        self, checkpoint: SavedState, where: str, run: 'ResumeSettings'
    ) -> List[Difference]:
        """Return how a checkpoint, read from a file, differs; or refuse it."""
        state = checkpoint['optimizer'][self.name] if self.name else checkpoint['optimizer']
        kinds = (checkpoint['meta'].get('kinds') or {}).get(self.name) or {}
        kind = self.kinds['optimizer']
        check_optimizer(self.wrapper.optimizer, kind, state, kinds.get('optimizer'), where)
        states = _schedules_of(checkpoint, self.name)
        saved, mine = kinds.get('schedulers'), self.kinds['schedulers']
        if saved is None:  # of MMEngine's runner, which saves no names of classes
            one, other = (
                [(each.keys(), each.get('param_name')) for each in some]
                for some in (states, self.states)
            )
            saved = mine if one == other else [f'a schedule of {name}' for _, name in one]
        found = self._compare_groups(state, run.scaled)
        if saved == mine:
            found += self._compare_schedulers(states, run)
        else:
            found.append(Difference(self._name('param_scheduler'), saved, mine))
        self.takes_config = bool(found) and (
            run.choice == 'config' or all(one.because_of for one in found)
        )
        problem, advice = '', f"To take the config's, at the step that is reached, {_TAKE_CONFIG}"
        if self.takes_config:
            if self._follows_metric and any(one.because_of != _LENGTH for one in found):
                problem = 'A schedule that follows results cannot be repeated with other settings.'
                advice = "Take the checkpoint's: accelerator.resume_settings='checkpoint'"
        else:
            if saved != mine:
                problem = 'Expected the same schedulers.'
            elif any(one.because_of == _SCALE for one in found):
                problem = 'Expected no other differences where auto_scale_lr sets the rate.'
            found = [one._replace(taken='checkpoint', because_of=None) for one in found]
        if problem:
            said = f'{where} differs from the config: {describe(found)}. {problem}'
            raise refusal(where, said, advice)
        return found

    def _name(self, first: str, *rest: str) -> str:
        return '.'.join(filter(None, (first, self.name, *rest)))

    def _compare_groups(self, state: SavedState, scaled: bool) -> List[Difference]:
        differences = []
        for saved, built in zip(state['param_groups'], self.groups):
            before, now = unscheduled(saved), unscheduled(built)
            for key in differing(group_settings(self.wrapper.optimizer, built), before, now):
                name = self._name('optim_wrapper', 'optimizer', key)
                why = _SCALE if scaled and key == 'lr' else None
                differences.append(Difference(name, before[key], now[key], why))
        return differences

    def _compare_schedulers(
        self, states: Sequence[Mapping[str, object]], run: 'ResumeSettings'
    ) -> List[Difference]:
        differences = []
        schedulers = zip(self.schedulers, states, self.states)
        for index, (scheduler, saved, built) in enumerate(schedulers):
            differ = set(differing(scheduler_settings(scheduler, built), saved, built))
            before = self._as_before(index, run) if differ else None
            why = _LENGTH if before and not differing(differ, saved, before) else None
            # What a scheduler derives from its arguments is left out, unless it is all.
            for key in sorted(differ & _arguments(scheduler)) or sorted(differ):
                kind = type(scheduler).__name__
                name = f'{self._name("param_scheduler")}[{index}] ({kind}).{key}'
                differences.append(Difference(name, plain(saved[key]), plain(built[key]), why))
        return differences

    def _as_before(self, index: int, run: 'ResumeSettings') -> Optional[StateDict]:
        """The state of a scheduler if the run and its epochs were as long as the checkpoint's."""
        options = copy.deepcopy(dict(self.configs[index]))
        end = run.then[options.get('by_epoch', True)]
        if not options or end is None:
            return None
        default = dict(optimizer=self.wrapper, epoch_length=run.epoch[0], end=end)
        try:
            return PARAM_SCHEDULERS.build(options, default_args=default).state_dict()
        except (ValueError, AssertionError):
            return None  # no run of that length can have had this config
        finally:
            for group, values in zip(param_groups(self.wrapper), self.groups):
                group.update(values)

    def apply(self, run: 'ResumeSettings') -> None:
        """Apply the config's settings after the saved states were loaded."""
        if not self.takes_config:
            return
        if self._follows_metric:  # only what follows the length of training differs
            for one, mine in zip(self.schedulers, self.states):
                one.load_state_dict({name: mine[name] for name in scheduler_settings(one, mine)})
            return
        for group, mine in zip(param_groups(self.wrapper), self.groups):
            for name in [each for each in group if each.startswith('initial_')]:
                del group[name]  # also of a schedule that the checkpoint alone has
            names = group_settings(self.wrapper.optimizer, mine)
            group.update({name: copy.deepcopy(mine[name]) for name in names})
        for one, state in zip(self.schedulers, self.states):
            one.load_state_dict(copy.deepcopy(state))
        converted = [bool(one.get('convert_to_iter_based')) for one in self.configs]
        replay(self.schedulers, converted, run.done, run.epoch)


# the runner -------------------------------------------------------------------------------------


def counted_epochs(meta: SavedState) -> Optional[bool]:
    """Whether the loop that a checkpoint is of counts epochs; None if that is not known."""
    if 'counts_epochs' in meta:
        return meta['counts_epochs']
    # MMEngine's runner saves the text of the config.
    train_cfg = re.search(
        r'^train_cfg = dict\((.*?)\)$', str(meta.get('cfg')), re.DOTALL | re.MULTILINE
    )
    if train_cfg is None:
        return None
    if re.search(r'IterBasedTrainLoop|by_epoch=False', train_cfg.group(1)):
        return False
    return True if re.search(r'EpochBasedTrainLoop|by_epoch=True', train_cfg.group(1)) else None


class ResumeSettings:
    """Compare settings before MMEngine loads states, and set them afterwards.

    Args:
        runner (DeviceRunner): Its optimizers and schedulers are as they were built.
    """

    def __init__(self, runner: AnyRunner) -> None:
        loop, config = runner.train_loop, runner.resume_state.scheduler_config
        optimizers = by_name(runner.optim_wrapper, runner.param_schedulers, config)
        self.optimizers = [OptimizerSettings(*built) for built in optimizers]
        self._names = [names_in_groups(runner.model, one.optimizer) for _, one, *_ in optimizers]
        self._loop, self.by_epoch = loop, isinstance(loop, EpochBasedTrainLoop)
        #: The epoch, if the checkpoint is of a loop that counts none.
        self._changed_epoch: Optional[int] = None
        self.choice = runner.accelerator_options.resume_settings
        self.scaled = bool((runner.auto_scale_lr or {}).get('enable'))
        self.work_dir = runner.work_dir
        self.limit = loop.max_epochs if self.by_epoch else loop.max_iters
        #: How long the run was, in epochs (True) and in iterations; None if not known.
        self.then: Dict[bool, Optional[int]] = {}
        #: Iterations of an epoch, then and now; epochs and iterations that are done.
        self.epoch, self.done = [length_of(loader_of(loop)) or 1] * 2, (0, 0)

    def _follow_order(self, checkpoint: Any, where: str) -> None:
        kinds = checkpoint['meta'].get('kinds') or {}
        for settings, names in zip(self.optimizers, self._names):
            saved = (kinds.get(settings.name) or {}).get('parameters')
            if saved is None:
                continue
            holder, key = checkpoint, 'optimizer'
            if settings.name:
                holder, key = checkpoint['optimizer'], settings.name
            holder[key], moved = follow_order(holder[key], saved, names, where)
            if moved == list(range(len(moved))):
                continue
            for schedule in _schedules_of(checkpoint, settings.name):
                for each in _OF_GROUPS & schedule.keys():
                    values = schedule[each]
                    schedule[each] = [values[n] for n in moved] + values[len(moved) :]

    def compare(self, checkpoint: SavedState, where: str) -> None:
        """Compare with a checkpoint, and say in one warning what differs and which is taken.

        Raises:
            CheckpointError: If training cannot go on from the checkpoint with this config.
        """
        scheduled = any(settings.schedulers for settings in self.optimizers)
        check_complete(checkpoint, where, scheduled and self.choice == 'checkpoint', self.work_dir)
        names = [settings.name for settings in self.optimizers]
        check_names(checkpoint['optimizer'], names, where)
        self._follow_order(checkpoint, where)
        info, meta = checkpoint['message_hub'].get('runtime_info') or {}, checkpoint['meta']
        self.then = {True: info.get('max_epochs'), False: info.get('max_iters')}
        epochs, iterations = self.then[True], self.then[False]
        if self.by_epoch and epochs and iterations:
            self.epoch[0] = max(1, iterations // epochs)
        before, differences = self.then[self.by_epoch], []
        epoch, then_by_epoch = meta['epoch'], counted_epochs(meta)
        if then_by_epoch is not None and then_by_epoch != self.by_epoch:
            before, epoch = None, meta['iter'] // self.epoch[1]
            self._follow_loop(then_by_epoch, epoch, meta['iter'], where)
        self.done = (epoch if self.by_epoch else 0, meta['iter'])
        if None not in (before, self.limit) and before != self.limit:
            limit = f'train_cfg.{"max_epochs" if self.by_epoch else "max_iters"}'
            differences.append(Difference(limit, before, self.limit))
        for settings in self.optimizers:
            differences += settings.compare(checkpoint, where, self)
        advice = f"To take the config's, {_TAKE_CONFIG}."
        if self.choice == 'config':
            advice = "They are taken as accelerator.resume_settings='config' says."
        elif all(difference.taken == 'config' for difference in differences):
            advice = 'They follow the config in any case.'
        if differences:
            log_warning(
                f'Resuming from {where}, which differs from the config in {len(differences)} '
                f'setting(s). {describe(differences)}. {advice}'
            )

    def _follow_loop(self, then_by_epoch: bool, epoch: int, iteration: int, where: str) -> None:
        """Go on at the same iteration in a loop that counts something else, and say so."""
        units = 'iterations', 'epochs'
        position = f'iteration {iteration}'
        if self.by_epoch:
            position = f'epoch {epoch + 1}, which has {self.epoch[1]} batches, after {iteration}'
            position += f' iterations ({iteration % self.epoch[1]} of this epoch)'
        log_warning(
            f'Resuming from {where}, whose train_cfg counts {units[then_by_epoch]}, with one that '
            f'counts {units[self.by_epoch]}: training goes on in {position}. Schedules that count '
            f'epochs go on where the checkpoint has them.'
        )
        self._changed_epoch = epoch if self.by_epoch else None

    def apply(self) -> None:
        """Set the settings that are taken, after MMEngine has loaded the checkpoint's states."""
        if self._changed_epoch is not None:
            self._loop._epoch = self._changed_epoch
        for settings in self.optimizers:
            settings.apply(self)
