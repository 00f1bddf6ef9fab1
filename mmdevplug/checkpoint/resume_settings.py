"""Decide whether a resumed run has the settings of its checkpoint or those of its config.

MMEngine loads the states of optimizers and schedulers over what the config says, without a word.
Here both are compared before, and afterwards the chosen settings are set, with the schedules at
the step that training has reached.
"""

import copy
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Set

from mmengine.optim import OptimWrapperDict
from mmengine.registry import PARAM_SCHEDULERS
from mmengine.runner import EpochBasedTrainLoop

from mmdevplug.optim.replay_schedulers import (
    Past,
    base_name,
    follows_metric,
    param_groups,
    replay_schedulers,
    restart_schedulers,
)
from mmdevplug.utils.logs import log_warning

from .compare_settings import (
    Difference,
    compare_groups,
    compare_schedulers,
    describe_differences,
    group_settings,
    is_same_kind,
    worth_saying,
)
from .resumable import check_optimizer, optimizer_states, refuse_schedulers, scheduler_kinds


class Part(NamedTuple):
    """One optimizer with its schedulers."""

    name: str
    wrapper: Any
    schedulers: List[Any]
    #: By scheduler; None for one that was no config.
    configs: List[Optional[Mapping[str, Any]]]


def list_parts(optim_wrapper: Any, schedulers: Any, config: Any) -> List[Part]:
    """List the optimizers of a runner with their schedulers and the configs of these."""
    if not isinstance(optim_wrapper, OptimWrapperDict):
        return [_part('', optim_wrapper, schedulers, config)]
    by_name = isinstance(config, Mapping) and 'type' not in config
    return [
        _part(name, one, (schedulers or {}).get(name), config[name] if by_name else config)
        for name, one in optim_wrapper.items()
    ]


def _part(name: str, wrapper: Any, schedulers: Optional[List[Any]], config: Any) -> Part:
    schedulers = list(schedulers or [])
    configs = list(config) if isinstance(config, (list, tuple)) else [config]
    configs = [one if isinstance(one, Mapping) else None for one in configs]
    return Part(name, wrapper, schedulers, configs if schedulers else [])


class Loop(NamedTuple):
    """How long this run is."""

    max_epochs: Optional[int]
    max_iters: Optional[int]
    #: Iterations of an epoch.
    length: int
    by_epoch: bool


class ResumeSettings:
    """Compare settings before MMEngine loads states, and set them afterwards.

    Args:
        parts (list[Part]): As they were built from the config, before any step.
        loop (Loop): Of this run.
        choice (str): ``'checkpoint'`` or ``'config'``: ``accelerator.resume_settings``.
        scaled_by (str, optional): What has set learning rates for the batch of this job, which
            hold in any case: a key of the config.
    """

    def __init__(
        self, parts: List[Part], loop: Loop, choice: str, scaled_by: Optional[str] = None
    ) -> None:
        self.parts, self.loop, self.choice, self.scaled_by = parts, loop, choice, scaled_by
        self._groups = [[_plain(group) for group in param_groups(part.wrapper)] for part in parts]
        self._states = [[_state(one) for one in part.schedulers] for part in parts]
        self._saved_groups: List[List[Dict[str, Any]]] = []
        self._saved_states: List[List[Dict[str, Any]]] = []
        #: By scheduler, the settings that the checkpoint's win.
        self._kept: List[List[Set[str]]] = []
        #: By optimizer, whose settings are taken: ``'checkpoint'``, ``'config'``.
        self._taken: List[Set[str]] = []
        #: By optimizer, whether its schedulers are of the same classes.
        self._same: List[bool] = []
        self._past = Past(0, 0, 1)

    @classmethod
    def of_runner(cls, runner: Any) -> 'ResumeSettings':
        """Read the settings of a :class:`mmdevplug.runner.DeviceRunner`, as it has built them."""
        loop = runner.train_loop
        scaled_by = 'accelerator.global_batch' if runner.global_batch.share is not None else None
        if (runner.auto_scale_lr or {}).get('enable'):
            scaled_by = 'auto_scale_lr'
        return cls(
            list_parts(
                runner.optim_wrapper, runner.param_schedulers, runner.global_batch.schedulers
            ),
            Loop(
                loop.max_epochs,
                loop.max_iters,
                len(loop.dataloader),
                isinstance(loop, EpochBasedTrainLoop),
            ),
            runner.accelerator_options.resume_settings,
            scaled_by,
        )

    def compare(self, checkpoint: Mapping[str, Any], where: str) -> None:
        """Compare with a checkpoint, and say in one warning what differs and which is taken.

        Raises:
            CheckpointError: If training cannot go on from the checkpoint with this config.
        """
        self._read_past(checkpoint)
        found: List[Difference] = []
        self._compare_length(checkpoint, found)
        saved = optimizer_states(checkpoint, [part.name for part in self.parts], where)
        for number, part in enumerate(self.parts):
            state, before = saved[number], len(found)
            kinds = (checkpoint['meta'].get('kinds') or {}).get(part.name) or {}
            optimizer = part.wrapper.optimizer
            mine = optimizer_kind(optimizer)
            check_optimizer(optimizer, mine, state, kinds.get('optimizer'), where)
            groups = [_plain(group) for group in state['param_groups']]
            if state.get('base_param_settings') is not None:
                groups.append(_plain(state['base_param_settings']))
            schedules = checkpoint.get('param_schedulers') or []
            if isinstance(schedules, Mapping):
                schedules = schedules.get(part.name, [])
            self._saved_groups.append(groups)
            self._saved_states.append(copy.deepcopy(schedules))
            self._compare_groups(number, found)
            self._check_schedulers(number, kinds.get('schedulers'), where, found)
            self._compare_schedulers(number, found)
            self._taken.append({one.taken for one in found[before:]})
        if found:
            self._say(found, where)

    def _say(self, found: List[Difference], where: str) -> None:
        hint = (
            "To take the config's, resume with --resume-settings config "
            "(accelerator.resume_settings='config')."
            if self.choice == 'checkpoint'
            else "They are taken as accelerator.resume_settings='config' says."
        )
        if all(one.taken == 'config' for one in found) and self.choice == 'checkpoint':
            hint = 'They follow the config in any case.'
        log_warning(
            f'Resuming from {where}, which differs from the config in {len(found)} setting(s). '
            f'{describe_differences(found)}. {hint}'
        )

    # what differs -------------------------------------------------------------------------------

    def _read_past(self, checkpoint: Mapping[str, Any]) -> None:
        hub = getattr(checkpoint.get('message_hub'), 'get', lambda *_: None)
        info = hub('runtime_info') or {}
        self._max_epochs, self._max_iters = info.get('max_epochs'), info.get('max_iters')
        length = self.loop.length
        if self.loop.by_epoch and self._max_epochs and self._max_iters:
            length = max(1, self._max_iters // self._max_epochs)
        meta = checkpoint['meta']
        self._past = Past(meta['epoch'] if self.loop.by_epoch else 0, meta['iter'], length)

    def _compare_length(self, checkpoint: Mapping[str, Any], found: List[Difference]) -> None:
        name = 'max_epochs' if self.loop.by_epoch else 'max_iters'
        before = self._max_epochs if self.loop.by_epoch else self._max_iters
        now = getattr(self.loop, name)
        if before is not None and now is not None and before != now:
            found.append(Difference(f'train_cfg.{name}', before, now, 'config'))

    def _compare_groups(self, number: int, found: List[Difference]) -> None:
        part = self.parts[number]
        optimizer = part.wrapper.optimizer
        # Without the settings that MMEngine logs.
        configured = self._groups[number][: len(optimizer.param_groups)]
        for saved, mine in zip(self._saved_groups[number], configured):
            for key, values in sorted(compare_groups(optimizer, saved, mine).items()):
                name = f'{_name_optimizer(part)}.{key}'
                scaled = self.scaled_by if key == 'lr' else None
                taken = self.choice if scaled is None else 'config'
                found.append(Difference(name, *values, taken, scaled))

    def _check_schedulers(
        self,
        number: int,
        kinds: Optional[List[str]],
        where: str,
        found: List[Difference],
    ) -> None:
        part, saved, mine = self.parts[number], self._saved_states[number], self._states[number]
        own = [type(one).__name__ for one in part.schedulers]
        given = kinds or [None] * len(saved)
        self._same.append(
            len(saved) == len(mine) and all(map(is_same_kind, mine, saved, own, given))
        )
        if not self._same[number]:
            named = scheduler_kinds(saved, kinds)
            if self.choice == 'checkpoint':
                refuse_schedulers(named, own, where)
            found.append(Difference(_name_schedulers(part), named, own, 'config'))

    def _compare_schedulers(self, number: int, found: List[Difference]) -> None:
        part, kept = self.parts[number], []
        self._kept.append(kept)
        for index, scheduler in enumerate(part.schedulers):
            kept.append(set())
            if not self._same[number]:
                continue
            saved, mine = self._saved_states[number][index], self._states[number][index]
            differ = compare_schedulers(scheduler, saved, mine)
            twin = self._as_before(part, index) if differ else None
            # What only follows the length of the run or of an epoch follows it.
            real = differ if twin is None else differ & compare_schedulers(scheduler, saved, twin)
            if 'total_steps' in real:
                real = real | (differ & {'end'})  # OneCycleLR refuses steps beyond them
            where = f'{_name_schedulers(part)}[{index}] ({type(scheduler).__name__})'
            for names, taken in ((real, self.choice), (differ - real, 'config')):
                for name in worth_saying(scheduler, names):
                    found.append(Difference(f'{where}.{name}', saved[name], mine[name], taken))
            if self.choice == 'checkpoint':
                kept[index] = real

    def _as_before(self, part: Part, index: int) -> Optional[Dict[str, Any]]:
        """The state of a scheduler if the run and its epochs were as long as the checkpoint's."""
        config = part.configs[index] if index < len(part.configs) else None
        if config is None or self._max_epochs is None or self._max_iters is None:
            return None
        options = copy.deepcopy(dict(config))
        end = self._max_epochs if options.get('by_epoch', True) else self._max_iters
        options.setdefault('end', end)
        groups = param_groups(part.wrapper)
        before = [_plain(group) for group in groups]
        try:
            twin = PARAM_SCHEDULERS.build(
                options,
                default_args=dict(optimizer=part.wrapper, epoch_length=self._past.length),
            )
        except (ValueError, AssertionError):
            return None  # no run of that length can have had this config
        finally:
            for group, values in zip(groups, before):
                _set_group(group, values)
        return _state(twin)

    # what is taken ------------------------------------------------------------------------------

    def apply(self, iterations: Optional[int] = None) -> None:
        """Set the settings that are taken, after MMEngine has loaded the checkpoint's states.

        Args:
            iterations (int, optional): How many iterations of today's length the past makes, for
                a batch that has changed: schedules move there. Defaults to None: those of the
                checkpoint.
        """
        if iterations is not None:
            self._past = Past(self._past.epochs, iterations, self.loop.length)
        for number, part in enumerate(self.parts):
            if 'config' in self._taken[number] or iterations is not None:
                self._apply(number, part)
        self._warn_of_end()

    def _apply(self, number: int, part: Part) -> None:
        wrapper, schedulers = part.wrapper, part.schedulers
        states = self._states[number]
        carries = any(map(follows_metric, schedulers)) and self._same[number]
        mixed = 'checkpoint' in self._taken[number]
        for group, saved, mine in zip(
            param_groups(wrapper), self._saved_groups[number], self._groups[number]
        ):
            names = group_settings(wrapper.optimizer, mine)
            values = {name: mine[name] for name in names}
            if mixed:
                of_rate = {'lr', base_name('lr')} if self.scaled_by is not None else set()
                values.update((name, saved[name]) for name in names - of_rate if name in saved)
            if carries:
                values.update(_carried(saved, values))
            group.update(copy.deepcopy(values))
            for name in [each for each in group if each.startswith('initial_')]:
                if name not in mine:
                    del group[name]  # a schedule of the checkpoint alone
        kept = self._kept[number]
        saved_states = self._saved_states[number] if self._same[number] else states
        for scheduler, mine, names, saved in zip(schedulers, states, kept, saved_states):
            state = {**mine, **{name: saved[name] for name in names}}
            if carries:
                changed = compare_schedulers(scheduler, saved, state)
                state = {**saved, **{name: state[name] for name in changed}}
            scheduler.load_state_dict(copy.deepcopy(state))
            if carries and hasattr(scheduler, 'base_values'):
                name = base_name(scheduler.param_name)
                scheduler.base_values = [group[name] for group in param_groups(wrapper)]
        if carries:
            return
        if mixed:
            restart_schedulers(wrapper, schedulers)
        converted = [bool((one or {}).get('convert_to_iter_based')) for one in part.configs]
        replay_schedulers(schedulers, self._past, self.loop.length, converted)

    def _warn_of_end(self) -> None:
        """Warn if this run is longer than its checkpoint's and schedules end with that one."""
        name = 'max_epochs' if self.loop.by_epoch else 'max_iters'
        before, now = getattr(self, f'_{name}'), getattr(self.loop, name)
        if before is None or now is None or now <= before:
            return
        for part in self.parts:
            of_rate = [one for one in part.schedulers if one.param_name == 'lr']
            lengths = [
                (self._max_epochs, self.loop.max_epochs)
                if one.by_epoch
                else (self._max_iters, self.loop.max_iters)
                for one in of_rate
            ]
            spanned = any(one.end >= then for one, (then, _) in zip(of_rate, lengths))
            if spanned and all(one.end < whole for one, (_, whole) in zip(of_rate, lengths)):
                ends = ', '.join(f'{type(one).__name__} with end={one.end}' for one in of_rate)
                log_warning(
                    f'Training goes on to {name}={now}, but the schedules of the learning rate '
                    f'end before ({ends}), and from there it stays as it is. It is '
                    f'{part.wrapper.optimizer.param_groups[0]["lr"]:.6g} now. Raise the end in '
                    f'the config and resume with --resume-settings config.'
                )


def _carried(saved: Mapping[str, Any], values: Mapping[str, Any]) -> Dict[str, Any]:
    """Keep what a metric has done to scheduled values, whatever they were in the beginning."""
    carried = {}
    for name in values:
        before, now = saved.get(base_name(name)), values.get(base_name(name))
        if before and now is not None:
            carried[name] = saved[name] if now == before else saved[name] / before * now
    return carried


def _name_optimizer(part: Part) -> str:
    return '.'.join(filter(None, ('optim_wrapper', part.name, 'optimizer')))


def _name_schedulers(part: Part) -> str:
    return '.'.join(filter(None, ('param_scheduler', part.name)))


def optimizer_kind(optimizer: Any) -> str:
    """Name the class of an optimizer; of the one inside ZeroRedundancyOptimizer."""
    return type(getattr(optimizer, 'optim', optimizer)).__name__


def describe_kinds(optim_wrapper: Any, schedulers: Any) -> Dict[str, Any]:
    """Name the classes of optimizers and schedulers, for a checkpoint that holds their states."""
    return {
        part.name: dict(
            optimizer=optimizer_kind(part.wrapper.optimizer),
            schedulers=[type(one).__name__ for one in part.schedulers],
        )
        for part in list_parts(optim_wrapper, schedulers, None)
    }


def _plain(group: Mapping[str, Any]) -> Dict[str, Any]:
    return {name: copy.deepcopy(value) for name, value in group.items() if name != 'params'}


def _state(scheduler: Any) -> Dict[str, Any]:
    return copy.deepcopy(scheduler.state_dict())


def _set_group(group: Dict[str, Any], values: Mapping[str, Any]) -> None:
    for name in [each for each in group if each != 'params' and each not in values]:
        del group[name]
    group.update((name, value) for name, value in values.items() if name != 'params')
