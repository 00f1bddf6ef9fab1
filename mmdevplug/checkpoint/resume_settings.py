"""Decide whether a resumed run has the settings of its checkpoint or those of its config.

MMEngine loads the states of optimizers and schedulers over what the config says, without a word.
Here both are compared before. Where the config's are taken, they are set again afterwards, and its
schedulers, as they were built, step to where training is.
"""

import copy
import inspect
from collections import Counter
from math import inf
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from mmengine.optim import OptimWrapperDict
from mmengine.registry import PARAM_SCHEDULERS
from mmengine.runner import EpochBasedTrainLoop
from torch.optim import Optimizer

from mmdevplug.config.fields import shortened
from mmdevplug.errors import CheckpointError
from mmdevplug.utils.annotations import AnyOptimWrapper, AnyRunner
from mmdevplug.utils.logs import log_warning
from mmdevplug.utils.loops import length_of, loader_of

from .refuse_resume import check_complete, check_names, check_optimizer

#: What MMEngine's schedulers change while they step.
_PROGRESS = {'_global_step', '_last_value', 'base_values', 'last_step', 'verbose'}
_PROGRESS |= {'best', 'cooldown_counter', 'num_bad_epochs'}
_MOST = 12  # entries of a message
_LENGTH = 'the length of training'
_TAKE_CONFIG = "resume with --resume-settings config (accelerator.resume_settings='config')."

# settings as values -----------------------------------------------------------------------------


class Difference(NamedTuple):
    """A setting that differs, and whose is taken."""

    name: str
    saved: object
    configured: object
    taken: str
    #: What has set it, if not ``accelerator.resume_settings``.
    because_of: Optional[str] = None


def describe(found: Sequence[Difference]) -> str:
    """List differences; those of several groups of parameters that are equal come once."""
    lines: Dict[str, int] = {}
    for name, saved, configured, taken, because_of in found:
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


def plain(value: Any) -> Any:
    """Return a setting as what can be compared and shown."""
    if isinstance(value, Counter):
        return sorted(value.elements())
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return value.tolist() if hasattr(value, 'tolist') else getattr(value, '__name__', value)


def unscheduled(group: Mapping[str, Any]) -> Dict[str, Any]:
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


def differing(names: Set[str], saved: Mapping[str, Any], mine: Mapping[str, Any]) -> List[str]:
    """List those settings that two dicts hold with different values."""
    both = sorted(names & saved.keys() & mine.keys())
    return [name for name in both if plain(saved[name]) != plain(mine[name])]


def group_settings(optimizer: Optimizer, group: Mapping[str, Any]) -> Set[str]:
    """Name the settings in a group; the rest are parameters and progress.

    Optimizers such as DAdaptation's and Schedule-Free's count their steps in the groups: in names
    that are not arguments of the class.
    """
    # ZeroRedundancyOptimizer has the groups of the optimizer inside of it.
    known = _arguments(getattr(optimizer, 'optim', optimizer))
    return {each for each in group if each in known or each not in optimizer.defaults} - {'params'}


def scheduler_settings(scheduler: object, state: Mapping[str, Any]) -> Set[str]:
    """Name the settings in the state of a scheduler; the rest is how far it has come."""
    # A class of somebody else's may count in names of its own.
    known = type(scheduler).__module__.startswith('mmengine.')
    return (set(state) if known else set(state) & _arguments(scheduler)) - _PROGRESS


def _arguments(instance: object) -> Set[str]:
    makers = [
        vars(each)['__init__'] for each in type(instance).__mro__ if '__init__' in vars(each)
    ]
    return {name for one in makers[:-1] for name in inspect.signature(one).parameters}


# schedules --------------------------------------------------------------------------------------


def replay(
    schedulers: Sequence[Any],
    converted: Sequence[bool],
    done: Tuple[int, int],
    epoch: Sequence[int],
) -> None:
    """Step schedulers that are where they were built through the training before.

    Args:
        schedulers (list): Of one optimizer.
        converted (list[bool]): By scheduler, whether its iterations were made of epochs.
        done (tuple): Epochs, 0 in a loop over iterations, and iterations.
        epoch (tuple): Iterations of an epoch, when they were done and from now on.
    """
    (epochs, iterations), (then, now) = done, epoch
    for one in schedulers:
        # PyTorch's order of calls does not hold: the optimizer's steps were done before.
        one.optimizer._global_step = iterations
    for number in range(epochs + 1):
        steps = then if number < epochs else iterations - epochs * then
        of_converted = steps * now // then
        for step in range(max(steps, of_converted)):
            for one, converts in zip(schedulers, converted):
                if not one.by_epoch and step < (of_converted if converts else steps):
                    one.step()
        for one in schedulers:
            if one.by_epoch and number < epochs:
                one.step()


def param_groups(wrapper: AnyOptimWrapper) -> List[Dict[str, Any]]:
    """List what schedulers change: groups, and the settings that MMEngine logs with several."""
    base = getattr(wrapper, 'base_param_settings', None)
    return wrapper.optimizer.param_groups + ([] if base is None else [base])


class OptimizerSettings:
    """The settings of one optimizer and its schedulers, as they were built from a config.

    Args:
        name (str): Of the optimizer in an OptimWrapperDict, or ''.
        wrapper (OptimWrapper): It has made no step yet.
        schedulers (list, optional): Of the optimizer.
        config: Of the schedulers: a dict, a list, or what was built before.
    """

    #: Whose settings differ and are taken.
    taken: Set[str] = frozenset()

    def __init__(
        self, name: str, wrapper: AnyOptimWrapper, schedulers: Optional[List[Any]], config: object
    ) -> None:
        self.name, self.wrapper, self.schedulers = name, wrapper, list(schedulers or [])
        configs = config if isinstance(config, (list, tuple)) else [config]
        self.configs = [one if isinstance(one, Mapping) else {} for one in configs]
        self.groups = [_copy(group) for group in param_groups(wrapper)]
        self.states = [copy.deepcopy(one.state_dict()) for one in self.schedulers]
        #: What of the checkpoint is taken where other settings are the config's.
        self.kept_groups: List[Dict[str, Any]] = []
        self.kept_states: List[Dict[str, Any]] = []

    def compare(
        self, checkpoint: Mapping[str, Any], where: str, run: 'ResumeSettings'
    ) -> List[Difference]:
        """Return how a checkpoint, read from a file, differs; or refuse it."""
        state = checkpoint['optimizer'][self.name] if self.name else checkpoint['optimizer']
        kinds = (checkpoint['meta'].get('kinds') or {}).get(self.name) or {}
        check_optimizer(self.wrapper.optimizer, self.kinds, state, kinds.get('optimizer'), where)
        states = checkpoint.get('param_schedulers') or []
        states = states.get(self.name, []) if isinstance(states, Mapping) else states
        found = self._compare_groups(state, run)
        saved, mine = kinds.get('schedulers'), self.kinds['schedulers']
        if saved is None:  # of MMEngine's runner, which saves no names of classes
            one, other = (
                [(each.keys(), each.get('param_name')) for each in some]
                for some in (states, self.states)
            )
            saved = mine if one == other else [f'a schedule of {name}' for _, name in one]
        if saved == mine:
            found += self._compare_schedulers(states, run)
        else:
            found.append(Difference(self._name('param_scheduler'), saved, mine, 'config'))
        self.taken = {one.taken for one in found}
        if saved != mine and run.choice == 'checkpoint':
            raise CheckpointError(
                f'{where} differs from the config in its schedulers: {describe(found[-1:])}. '
                f"Expected the same; to take the config's, at the step that training has reached, "
                f'{_TAKE_CONFIG}'
            )
        real = [one for one in found if one.taken == 'config' and one.because_of != _LENGTH]
        if self._follows_metric and real:
            raise CheckpointError(
                f'{where} differs from the config: {describe(real)}. A schedule that follows '
                f'results, such as ReduceOnPlateauLR, cannot be repeated with other settings. '
                f"Expected the checkpoint's, with accelerator.resume_settings='checkpoint' and "
                f'without auto_scale_lr; or take its weights alone, without --resume: '
                f'--cfg-options load_from={where}.'
            )
        return found

    @property
    def kinds(self) -> Dict[str, Any]:
        """The classes of the optimizer, or of the one inside a wrapper, and of the schedulers."""
        optimizer = getattr(self.wrapper.optimizer, 'optim', self.wrapper.optimizer)
        schedulers = [type(one).__name__ for one in self.schedulers]
        return dict(optimizer=type(optimizer).__name__, schedulers=schedulers)

    @property
    def _follows_metric(self) -> bool:
        return any(getattr(one, 'need_val_args', False) for one in self.schedulers)

    def _name(self, first: str, *rest: str) -> str:
        return '.'.join(filter(None, (first, self.name, *rest)))

    def _compare_groups(self, state: Mapping[str, Any], run: 'ResumeSettings') -> List[Difference]:
        optimizer, found = self.wrapper.optimizer, []
        for saved, mine in zip(state['param_groups'], self.groups):
            one, other = unscheduled(saved), unscheduled(mine)
            for key in differing(group_settings(optimizer, mine), one, other):
                scaled = run.scaled and key == 'lr'
                taken = ('config', 'auto_scale_lr') if scaled else (run.choice, None)
                name = self._name('optim_wrapper', 'optimizer', key)
                found.append(Difference(name, one[key], other[key], *taken))
        base = state.get('base_param_settings')
        of_rate = {'lr', 'initial_lr'} if run.scaled else set()
        self.kept_groups = [
            {name: saved[name] for name in group_settings(optimizer, saved) - of_rate}
            for saved in state['param_groups'] + ([base] if base else [])
        ]
        return found

    def _compare_schedulers(
        self, states: Sequence[Mapping[str, Any]], run: 'ResumeSettings'
    ) -> List[Difference]:
        found = []
        for index, (one, saved, mine) in enumerate(zip(self.schedulers, states, self.states)):
            differ = set(differing(scheduler_settings(one, mine), saved, mine))
            before = self._as_before(index, run) if differ else None
            # What only follows the length of the run or of an epoch follows it.
            real = set(differing(differ, saved, before or mine))
            if 'total_steps' in real:
                real |= differ & {'end'}  # OneCycleLR refuses steps beyond them
            for keys, *taken in ((real, run.choice), (differ - real, 'config', _LENGTH)):
                # What a scheduler derives from its arguments is left out, unless it is all.
                for key in sorted(keys & _arguments(one)) or sorted(keys):
                    name = f'{self._name("param_scheduler")}[{index}] ({type(one).__name__}).{key}'
                    found.append(Difference(name, plain(saved[key]), plain(mine[key]), *taken))
            kept = real if run.choice == 'checkpoint' else set()
            self.kept_states.append({name: saved[name] for name in kept})
        return found

    def _as_before(self, index: int, run: 'ResumeSettings') -> Optional[Dict[str, Any]]:
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
        """Set what is the config's, after the saved states were loaded."""
        if 'config' not in self.taken:
            return
        if self._follows_metric:  # only what follows the length of training differs
            for one, mine, kept in zip(self.schedulers, self.states, self.kept_states):
                names = scheduler_settings(one, mine) - kept.keys()
                one.load_state_dict({name: mine[name] for name in names})
            return
        mixed, groups = 'checkpoint' in self.taken, param_groups(self.wrapper)
        for group, mine, kept in zip(groups, self.groups, self.kept_groups):
            names = group_settings(self.wrapper.optimizer, mine)
            values = copy.deepcopy({**mine, **kept} if mixed else mine)
            for name in [each for each in group if each.startswith('initial_')]:
                del group[name]  # also of a schedule that the checkpoint alone has
            group.update({name: values[name] for name in names})
            if mixed:
                started = [name for name in group if f'initial_{name}' in group]
                group.update({name: group[f'initial_{name}'] for name in started})
        for one, state in zip(self.schedulers, self.states):
            one.load_state_dict(copy.deepcopy(state))
        for one, kept in zip(self.schedulers, self.kept_states if mixed else ()):
            base_values = [group[f'initial_{one.param_name}'] for group in groups]
            one.load_state_dict(dict(kept, base_values=base_values, last_step=-1, _global_step=-1))
            one.step()
        converted = [bool(one.get('convert_to_iter_based')) for one in self.configs]
        replay(self.schedulers, converted, run.done, run.epoch)

    def describe_early_end(self, run: 'ResumeSettings') -> Optional[str]:
        """Say where the schedules of the rate end, if the run ended there and no longer does."""
        lasts = [
            (one, min(one.end, one.begin + getattr(one, 'T_max', one.end)))
            for one in self.schedulers
            if one.param_name == 'lr'
        ]
        if not any(last >= (run.then[one.by_epoch] or inf) for one, last in lasts) or any(
            last >= (run.now[one.by_epoch] or 0) for one, last in lasts
        ):
            return None
        ends = ', '.join(f'{type(one).__name__} at {last}' for one, last in lasts)
        then = 'rises again' if any(one.end > last for one, last in lasts) else 'stays as it is'
        return f'the schedules of the learning rate end before ({ends}), and from there it {then}'


def _copy(group: Mapping[str, Any]) -> Dict[str, Any]:
    return {name: copy.deepcopy(value) for name, value in group.items() if name != 'params'}


# the runner -------------------------------------------------------------------------------------


class ResumeSettings:
    """Compare settings before MMEngine loads states, and set them afterwards.

    Args:
        runner (DeviceRunner): Its optimizers and schedulers are as they were built.
    """

    def __init__(self, runner: AnyRunner) -> None:
        loop, config = runner.train_loop, runner.scheduler_config
        self.optimizers = list_optimizers(runner.optim_wrapper, runner.param_schedulers, config)
        self.by_epoch = isinstance(loop, EpochBasedTrainLoop)
        self.choice = runner.accelerator_options.resume_settings
        self.scaled = bool((runner.auto_scale_lr or {}).get('enable'))
        self.work_dir = runner.work_dir
        #: How long the run was and is, in epochs (True) and in iterations; None if not known.
        self.now = {True: loop.max_epochs, False: loop.max_iters}
        self.then: Dict[bool, Optional[int]] = self.now
        #: Iterations of an epoch, then and now; epochs and iterations that are done.
        self.epoch, self.done = [length_of(loader_of(loop)) or 1] * 2, (0, 0)

    def compare(self, checkpoint: Mapping[str, Any], where: str) -> None:
        """Compare with a checkpoint, and say in one warning what differs and which is taken.

        Raises:
            CheckpointError: If training cannot go on from the checkpoint with this config.
        """
        scheduled = any(one.schedulers for one in self.optimizers)
        check_complete(checkpoint, where, scheduled and self.choice == 'checkpoint', self.work_dir)
        check_names(checkpoint['optimizer'], [one.name for one in self.optimizers], where)
        info, meta = checkpoint['message_hub'].get('runtime_info') or {}, checkpoint['meta']
        self.then = {True: info.get('max_epochs'), False: info.get('max_iters')}
        if self.by_epoch and all(self.then.values()):
            self.epoch[0] = max(1, self.then[False] // self.then[True])
        self.done = (meta['epoch'] if self.by_epoch else 0, meta['iter'])
        before, now = self.then[self.by_epoch], self.now[self.by_epoch]
        found = []
        if None not in (before, now) and before != now:
            found.append(Difference(f'train_cfg.{self._limit}', before, now, 'config'))
        for one in self.optimizers:
            found += one.compare(checkpoint, where, self)
        advice = f"To take the config's, {_TAKE_CONFIG}"
        if self.choice == 'config':
            advice = "They are taken as accelerator.resume_settings='config' says."
        elif all(one.taken == 'config' for one in found):
            advice = 'They follow the config in any case.'
        if found:
            log_warning(
                f'Resuming from {where}, which differs from the config in {len(found)} '
                f'setting(s). {describe(found)}. {advice}'
            )

    @property
    def _limit(self) -> str:
        return 'max_epochs' if self.by_epoch else 'max_iters'

    def apply(self) -> None:
        """Set the settings that are taken, after MMEngine has loaded the checkpoint's states."""
        for one in self.optimizers:
            one.apply(self)
            early = one.describe_early_end(self)
            if early:
                limit = f'{self._limit}={self.now[self.by_epoch]}'
                log_warning(
                    f'Training goes on to {limit}, but {early}. Raise that in the config and '
                    f'{_TAKE_CONFIG}'
                )


def list_optimizers(
    optim_wrapper: AnyOptimWrapper, schedulers: Any, config: Any
) -> List[OptimizerSettings]:
    """List the optimizers of a runner with their schedulers and the configs of these."""
    if not isinstance(optim_wrapper, OptimWrapperDict):
        return [OptimizerSettings('', optim_wrapper, schedulers, config)]
    schedulers = schedulers or {}
    by_name = isinstance(config, Mapping) and 'type' not in config
    return [
        OptimizerSettings(name, one, schedulers.get(name), config.get(name) if by_name else config)
        for name, one in optim_wrapper.items()
    ]


def describe_kinds(optim_wrapper: AnyOptimWrapper, schedulers: Any) -> Dict[str, Any]:
    """Name the classes of optimizers and schedulers, for a checkpoint that holds their states."""
    return {one.name: one.kinds for one in list_optimizers(optim_wrapper, schedulers, None)}
