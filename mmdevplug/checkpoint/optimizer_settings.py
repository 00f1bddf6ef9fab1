"""One optimizer with its schedulers: compare its settings with saved ones, and set those taken."""

import copy
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Set

from mmengine.registry import PARAM_SCHEDULERS
from torch.optim import Optimizer

from mmdevplug.optim.replay_schedulers import (
    Past,
    base_name,
    follows_metric,
    param_groups,
    replay_schedulers,
    restart_schedulers,
)
from mmdevplug.utils.annotations import AnyOptimWrapper

from .compare_settings import (
    Difference,
    compare_groups,
    compare_schedulers,
    group_settings,
    is_same_kind,
    worth_saying,
)
from .refuse_resume import check_optimizer, refuse_schedulers, scheduler_kinds


class Length(NamedTuple):
    """How long a run is; None where that is not known."""

    max_epochs: Optional[int]
    max_iters: Optional[int]
    #: Iterations of an epoch.
    epoch: int

    def of(self, by_epoch: bool) -> Optional[int]:
        """Return the length in epochs or in iterations."""
        return self.max_epochs if by_epoch else self.max_iters


class OptimizerSettings:
    """The settings of one optimizer and its schedulers, as they were built from a config.

    Args:
        name (str): Of the optimizer in an OptimWrapperDict, or ''.
        wrapper (OptimWrapper): It has made no step yet.
        schedulers (list, optional): Of the optimizer.
        config: Of the schedulers: a dict, a list, or what was built before.
    """

    def __init__(
        self, name: str, wrapper: AnyOptimWrapper, schedulers: Optional[List[Any]], config: object
    ) -> None:
        self.name, self.wrapper, self.schedulers = name, wrapper, list(schedulers or [])
        configs = config if isinstance(config, (list, tuple)) else [config]
        self._configs = [one if isinstance(one, Mapping) else {} for one in configs]
        self._groups = [_copy(group) for group in param_groups(wrapper)]
        self._states = [copy.deepcopy(one.state_dict()) for one in self.schedulers]
        self._saved_groups: List[Dict[str, Any]] = []
        self._saved_states: List[Dict[str, Any]] = []
        #: Whether the saved states are those of such schedulers.
        self._same = False
        #: By scheduler, the settings of the checkpoint that are taken.
        self._kept: List[Set[str]] = [set() for _ in self.schedulers]
        #: The key of the config that has scaled learning rates, which hold in any case.
        self._scaled_by: Optional[str] = None
        #: Whose settings differ and are taken.
        self._taken: Set[str] = set()

    def compare(
        self,
        checkpoint: Mapping[str, Any],
        state: Mapping[str, Any],
        where: str,
        choice: str,
        scaled_by: Optional[str],
        then: Length,
    ) -> List[Difference]:
        """Return how a checkpoint differs, or refuse it.

        Args:
            checkpoint (dict): The checkpoint.
            state (dict): Of this optimizer in it.
            where (str): The file.
            choice (str): ``'checkpoint'`` or ``'config'``.
            scaled_by (str, optional): The key of the config that has scaled learning rates.
            then (Length): Of the run that saved the checkpoint.
        """
        self._scaled_by = scaled_by
        kinds = (checkpoint['meta'].get('kinds') or {}).get(self.name) or {}
        optimizer = self.wrapper.optimizer
        check_optimizer(optimizer, optimizer_kind(optimizer), state, kinds.get('optimizer'), where)
        base = state.get('base_param_settings')
        self._saved_groups = [_copy(group) for group in state['param_groups']]
        self._saved_groups += [] if base is None else [_copy(base)]
        states = checkpoint.get('param_schedulers') or []
        states = states.get(self.name, []) if isinstance(states, Mapping) else states
        self._saved_states = copy.deepcopy(list(states))
        found = self._compare_groups(choice)
        found += self._compare_kinds(choice, kinds.get('schedulers'), where)
        if self._same:
            found += self._compare_schedulers(choice, then)
        self._taken = {one.taken for one in found}
        return found

    def _compare_groups(self, choice: str) -> List[Difference]:
        optimizer = self.wrapper.optimizer
        found = []
        # Without the settings that MMEngine logs.
        mine = self._groups[: len(optimizer.param_groups)]
        for saved, configured in zip(self._saved_groups, mine):
            for key, values in sorted(compare_groups(optimizer, saved, configured).items()):
                scaled = self._scaled_by if key == 'lr' else None
                name = _join('optim_wrapper', self.name, 'optimizer', key)
                taken = choice if scaled is None else 'config'
                found.append(Difference(name, *values, taken, scaled))
        return found

    def _compare_kinds(
        self, choice: str, kinds: Optional[List[str]], where: str
    ) -> List[Difference]:
        saved, mine = self._saved_states, self._states
        given = kinds or [None] * len(saved)
        self._same = len(saved) == len(mine) and all(
            map(is_same_kind, self.schedulers, mine, saved, given)
        )
        if self._same:
            return []
        named = scheduler_kinds(saved, kinds)
        own = [type(one).__name__ for one in self.schedulers]
        if choice == 'checkpoint':
            refuse_schedulers(named, own, where)
        return [Difference(_join('param_scheduler', self.name), named, own, 'config')]

    def _compare_schedulers(self, choice: str, then: Length) -> List[Difference]:
        found = []
        for index, scheduler in enumerate(self.schedulers):
            saved, mine = self._saved_states[index], self._states[index]
            differ = compare_schedulers(scheduler, saved, mine)
            before = self._as_before(index, then) if differ else None
            # What only follows the length of the run or of an epoch follows it.
            real = differ & compare_schedulers(scheduler, saved, before or mine)
            if 'total_steps' in real:
                real |= differ & {'end'}  # OneCycleLR refuses steps beyond them
            name = f'{_join("param_scheduler", self.name)}[{index}] ({type(scheduler).__name__})'
            for keys, taken in ((real, choice), (differ - real, 'config')):
                for key in worth_saying(scheduler, keys):
                    found.append(Difference(f'{name}.{key}', saved[key], mine[key], taken))
            if choice == 'checkpoint':
                self._kept[index] = real
        return found

    def _as_before(self, index: int, then: Length) -> Optional[Dict[str, Any]]:
        """The state of a scheduler if the run and its epochs were as long as the checkpoint's."""
        options = copy.deepcopy(dict(self._configs[index]))
        end = then.of(options.get('by_epoch', True))
        if not options or end is None:
            return None
        options.setdefault('end', end)
        groups = param_groups(self.wrapper)
        before = [_copy(group) for group in groups]
        try:
            return PARAM_SCHEDULERS.build(
                options, default_args=dict(optimizer=self.wrapper, epoch_length=then.epoch)
            ).state_dict()
        except (ValueError, AssertionError):
            return None  # no run of that length can have had this config
        finally:
            for group, values in zip(groups, before):
                for name in group.keys() - values.keys() - {'params'}:
                    del group[name]
                group.update(values)

    def apply(self, past: Past, length: int) -> None:
        """Set what is taken, after the saved states were loaded.

        Args:
            past (Past): The steps that schedules have made.
            length (int): Iterations of an epoch from now on.
        """
        if 'config' not in self._taken:
            return
        carries = any(map(follows_metric, self.schedulers)) and self._same
        mixed = 'checkpoint' in self._taken
        self._set_groups(mixed, carries)
        self._set_schedulers(carries)
        if carries:
            return  # what metrics have done cannot be repeated
        if mixed:
            restart_schedulers(self.wrapper, self.schedulers)
        converted = [bool(one.get('convert_to_iter_based')) for one in self._configs]
        replay_schedulers(self.schedulers, past, length, converted)

    def _set_groups(self, mixed: bool, carries: bool) -> None:
        """Set all settings of the groups, as they are before any step."""
        of_rate = set() if self._scaled_by is None else {'lr', base_name('lr')}
        for group, saved, mine in zip(
            param_groups(self.wrapper), self._saved_groups, self._groups
        ):
            names = group_settings(self.wrapper.optimizer, mine)
            values = {name: mine[name] for name in names}
            if mixed:
                values.update((name, saved[name]) for name in names - of_rate if name in saved)
            if carries:
                values.update(_carried(saved, values))
            group.update(copy.deepcopy(values))
            for name in group.keys() - mine.keys():
                if name.startswith(base_name('')):
                    del group[name]  # of a schedule that the checkpoint alone has

    def _set_schedulers(self, carries: bool) -> None:
        saved_states = self._saved_states if self._same else self._states
        for scheduler, mine, saved, kept in zip(
            self.schedulers, self._states, saved_states, self._kept
        ):
            state = {**mine, **{name: saved[name] for name in kept}}
            if carries:
                changed = compare_schedulers(scheduler, saved, state)
                state = {**saved, **{name: state[name] for name in changed}}
            scheduler.load_state_dict(copy.deepcopy(state))
            if carries and hasattr(scheduler, 'base_values'):
                name = base_name(scheduler.param_name)
                scheduler.base_values = [group[name] for group in param_groups(self.wrapper)]

    def describe_early_end(self, then: Length, now: Length) -> Optional[str]:
        """Say where schedules of the rate end, if that was the end of the run and is no longer."""
        of_rate = [one for one in self.schedulers if one.param_name == 'lr']
        for one in of_rate:
            lowest = one.begin + (getattr(one, 'T_max', None) or one.end)
            if then.of(one.by_epoch) == lowest < min(one.end, now.of(one.by_epoch) or 0):
                return (
                    f'{type(one).__name__} with T_max={one.T_max} has its lowest rate before, and '
                    f'from there the learning rate rises again'
                )
        spanned = any(one.end >= (then.of(one.by_epoch) or one.end + 1) for one in of_rate)
        if not spanned or any(one.end >= (now.of(one.by_epoch) or 0) for one in of_rate):
            return None
        ends = ', '.join(f'{type(one).__name__} with end={one.end}' for one in of_rate)
        rate = self.wrapper.optimizer.param_groups[0]['lr']
        return (
            f'the schedules of the learning rate end before ({ends}), and from there it stays as '
            f'it is. It is {rate:.6g} now'
        )


def optimizer_kind(optimizer: Optimizer) -> str:
    """Name the class of an optimizer; of the one inside ZeroRedundancyOptimizer."""
    return type(getattr(optimizer, 'optim', optimizer)).__name__


def _carried(saved: Mapping[str, Any], values: Mapping[str, Any]) -> Dict[str, Any]:
    """Keep what a metric has done to scheduled values, whatever they were in the beginning."""
    carried = {}
    for name in values:
        before, now = saved.get(base_name(name)), values.get(base_name(name))
        if before and now is not None:
            carried[name] = saved[name] if now == before else saved[name] / before * now
    return carried


def _join(*names: str) -> str:
    return '.'.join(filter(None, names))


def _copy(group: Mapping[str, Any]) -> Dict[str, Any]:
    return {name: copy.deepcopy(value) for name, value in group.items() if name != 'params'}
