"""Trainings that resume with other settings of optimizers and schedulers than they began with."""

import copy
import itertools
import re
from types import SimpleNamespace
from typing import NamedTuple

from mmengine.config import Config
from mmengine.optim import _ParamScheduler, build_optim_wrapper
from mmengine.registry import PARAM_SCHEDULERS, RUNNERS

from mmdevplug.checkpoint.resume_settings import OptimizerSettings, describe, param_groups
from mmdevplug.utils.model import list_optim_wrappers
from tests.checkpoint.resume_cases import two_optimizers
from tests.checkpoint.resuming import Stop, quickly, tiny
from tests.checkpoint.training import NoisyModel
from tests.jobs import messages_of, note

_numbers = itertools.count()
#: The warnings that are about settings and hooks.
SAID = 'differs from the config|nothing is left|config has|an EMAHook|not exactly'


@PARAM_SCHEDULERS.register_module(force=True)
class Zigzag(_ParamScheduler):
    """A user's schedule, which counts by itself."""

    def __init__(self, optimizer, low=0.5, **kwargs):
        self.low, self.turns = low, 0
        super().__init__(optimizer, 'lr', **kwargs)

    def _get_value(self):
        self.turns += 1
        factor = self.low if self.turns % 2 else 1.0
        return [value * factor for value in self.base_values]


def described_of_runner(runner, **_):
    """An iteration, and the settings of all groups of all optimizers."""
    wrappers = list_optim_wrappers(runner.optim_wrapper)
    return runner.iter, [group for each in wrappers for group in described(each)]


def described(wrapper):
    """The settings of all groups of an optimizer, and those that MMEngine logs."""
    return [
        {name: repr(value) for name, value in sorted(group.items()) if name != 'params'}
        for group in param_groups(wrapper)
    ]


class Case(NamedTuple):
    """What a training begins with and what its config says when it resumes."""

    before: dict
    after: dict
    #: What the warning holds.
    said: list
    #: A config from the beginning of which the checkpoint's choice has the rates.
    kept: dict = None
    #: After which iteration it is interrupted, 5 of which are an epoch.
    stop: int = 8


def run(work_dir, options, resume=False, stop=None, choice='checkpoint', validates=False):
    """Train as if in a separate process; return the groups by iteration, and the warnings."""
    defaults = dict(val_cfg=None, val_dataloader=None, val_evaluator=None)
    if validates:
        defaults = dict(train_cfg__val_interval=1)
    cfg = tiny(work_dir, **{'custom_hooks': [], **defaults, **options})
    cfg['accelerator'].update(resume_settings=choice, memory=False)
    cfg.update(experiment_name=f'changed_{next(_numbers)}', resume=bool(resume))
    if resume:
        cfg['load_from'] = str(resume)
    with quickly():
        runner = RUNNERS.build(Config(cfg))
        seen = note(runner, 'before_train_iter', described_of_runner)
        if stop is not None:
            runner.register_hook(Stop(stop, save=True))
        with messages_of(runner.logger) as lines:
            try:
                runner.train()
            except SystemExit:
                assert stop is not None
    return dict(seen), [line for line in lines if re.search(SAID, line)]


def interrupt(work_dir, options, stop=8):
    """Interrupt a training after an iteration, 5 of which are an epoch; return its checkpoint."""
    run(work_dir, options, stop=stop)
    return next(work_dir.glob('interrupted*.pth')).rename(work_dir / 'kept.pth')


class Simulated:
    """Optimizer and schedulers of a config, stepped as MMEngine's loops step them.

    Args:
        options (dict): As :func:`plan` makes them.
    """

    def __init__(self, options, epoch=5):
        model, self.config = NoisyModel(), options.get('param_scheduler') or []
        self.by_epoch, count = options.get('by_epoch', True), options.get('length')
        # MMEngine's loops of iterations say max_epochs=1.
        epochs = (count or 4) if self.by_epoch else 1
        iters = epoch * epochs if self.by_epoch else (count or 20)
        self.length, self.epoch = {True: epochs, False: iters}, epoch
        self.wrapper = build_optim_wrapper(model, Config(options['optim_wrapper'])._cfg_dict)
        self.schedulers = [
            PARAM_SCHEDULERS.build(
                dict(one, end=one.get('end', self.length[one.get('by_epoch', True)])),
                default_args=dict(optimizer=self.wrapper, epoch_length=epoch),
            )
            for one in self.config
        ]
        self.settings = OptimizerSettings('', self.wrapper, self.schedulers, self.config)

    def train(self, first=0, last=None):
        """Return the settings of all groups by iteration."""
        seen = {}
        for number in range(first, last or self.length[False]):
            seen[number] = described(self.wrapper)
            self.wrapper.step()
            ends = self.by_epoch and (number + 1) % self.epoch == 0
            for by_epoch in [False] + [True] * ends:
                for one in self.schedulers:
                    if one.by_epoch == by_epoch:
                        one.step()
        return seen

    def checkpoint(self, kinds=True):
        """What MMEngine saves of it, on our side with the names of classes."""
        return copy.deepcopy(
            dict(
                meta=dict(kinds={'': self.settings.kinds}) if kinds else {},
                optimizer=self.wrapper.state_dict(),
                param_schedulers=[one.state_dict() for one in self.schedulers],
            )
        )

    def resume(self, before, done, choice, scaled=False, kinds=True):
        """Resume another one as the runner does; return what differs, in words."""
        checkpoint = before.checkpoint(kinds)
        run = SimpleNamespace(
            choice=choice,
            scaled=scaled,
            then=before.length,
            epoch=(before.epoch, self.epoch),
            done=(done // before.epoch if self.by_epoch else 0, done),
        )
        found = self.settings.compare(checkpoint, 'a.pth', run)
        self.wrapper.load_state_dict(checkpoint['optimizer'])
        for one, state in zip(self.schedulers, checkpoint['param_schedulers']):
            one.load_state_dict(state)
        self.settings.apply(run)
        return describe(found)


def resumed(case, choice, kinds=True):
    """Interrupt and resume a simulated training; return settings by iteration and what is said."""
    before, after = Simulated(case.before), Simulated(case.after)
    before.train(0, case.stop)
    said = after.resume(before, case.stop, choice, kinds=kinds)
    return after.train(case.stop), said


def trained(options):
    """The settings by iteration of a simulated training that is not interrupted."""
    return Simulated(options).train()


# cases ------------------------------------------------------------------------------------------

STEPS = dict(type='MultiStepLR', milestones=[1, 3], gamma=0.5)
LR = 'optim_wrapper.optimizer.lr: checkpoint 0.02'


def plan(*schedulers, lr=0.02, kind='SGD', wrapper=None, **more):
    """A config of schedulers and an optimizer."""
    optimizer = dict(type=kind, lr=lr)
    if kind == 'SGD':
        optimizer['momentum'] = 0.9
    optimizer.update(more.pop('optimizer', {}))
    return dict(
        optim_wrapper=dict(type='OptimWrapper', optimizer=optimizer, **(wrapper or {})),
        param_scheduler=[dict(one) for one in schedulers] or None,
        **more,
    )


def _schedule(kind, said, before, **changes):
    """A setting of a schedule changes."""
    before = dict(before, type=kind)
    return Case(plan(before), plan(dict(before, **changes)), said)


def _optimizer(said, kind='SGD', stop=8, **changes):
    """A setting of the optimizer changes."""
    now = plan(STEPS, kind=kind, optimizer=changes)
    return Case(plan(STEPS, kind=kind), now, said, stop=stop)


def _longer(*schedulers, said=(), by_epoch=True, **options):
    """Six epochs in place of four, or 30 iterations in place of 20."""
    now = plan(*schedulers, length=6 if by_epoch else 30, by_epoch=by_epoch)
    return Case(plan(*schedulers, by_epoch=by_epoch), now, list(said), kept=now, **options)


_POLY = dict(type='PolyLR', power=0.9, eta_min=0.001)
_CYCLE = dict(eta_max=0.05, by_epoch=False)
_WARM = dict(type='LinearLR', start_factor=0.1, by_epoch=False, end=7)
TWO = two_optimizers(dict(type='StepLR', step_size=1, gamma=0.5))


def changed_two(**changes):
    """A config of two optimizers, with changes by the path of their key."""
    cfg = Config(TWO)
    cfg.merge_from_dict(changes)
    return cfg._cfg_dict.to_dict()


_DECAY = dict(weight_decay=0.1)
_MULT = {'net.0': dict(lr_mult=0.1), 'net.6': dict(decay_mult=0.0)}
_GREATER = {'net.0': dict(lr_mult=0.5), 'net.6': dict(decay_mult=2.0)}

CASES = dict(
    lr=_optimizer([LR + ' {}, config 0.2 {}'], lr=0.2),
    lr_between_epochs=_optimizer([LR], lr=0.2, stop=10),
    momentum=_optimizer(['momentum: checkpoint 0.9'], momentum=0.5),
    weight_decay=_optimizer(['weight_decay: checkpoint 0'], weight_decay=0.1),
    nesterov=_optimizer(['nesterov: checkpoint False'], nesterov=True),
    betas=_optimizer(['betas: checkpoint [0.9, 0.999]'], 'AdamW', betas=(0.8, 0.99)),
    lr_mult=Case(
        plan(STEPS, optimizer=_DECAY, wrapper=dict(paramwise_cfg=dict(custom_keys=_MULT))),
        plan(STEPS, optimizer=_DECAY, wrapper=dict(paramwise_cfg=dict(custom_keys=_GREATER))),
        [
            'lr (2 groups): checkpoint 0.002',
            'config 0.01',
            'weight_decay (2 groups): checkpoint 0.0',
        ],
    ),
    no_schedule=Case(plan(), plan(lr=0.3), [LR]),
    gamma=_schedule('StepLR', ['gamma'], dict(step_size=1, gamma=0.5), gamma=0.7),
    step_size=_schedule('StepLR', ['step_size: checkpoint 1'], dict(step_size=1), step_size=2),
    milestones=_schedule(
        'MultiStepLR',
        ['milestones: checkpoint [1, 3] {}, config [2, 3]'],
        dict(milestones=[1, 3]),
        milestones=[2, 3],
    ),
    T_max=_schedule(
        'CosineAnnealingLR', ['T_max', 'eta_min'], dict(T_max=4), T_max=3, eta_min=0.001
    ),
    eta_min_ratio=_schedule(
        'CosineAnnealingLR', ['eta_min_ratio'], dict(T_max=4, eta_min_ratio=0.1), eta_min_ratio=0.2
    ),
    periods=_schedule(
        'CosineRestartLR',
        ['periods: checkpoint [2, 2]', 'restart_weights'],
        dict(periods=[2, 2], eta_min=0.0, restart_weights=[1, 0.5]),
        periods=[1, 3],
        restart_weights=[1, 0.9],
    ),
    power=_schedule('PolyLR', ['power'], dict(power=0.9), power=2.0),
    end=_schedule('PolyLR', ['end: checkpoint 2 {}, config 4 {}'], dict(end=2), end=4),
    begin=_schedule('ExponentialLR', ['begin'], dict(gamma=0.5), begin=1),
    by_epoch=_schedule('ExponentialLR', ['by_epoch'], dict(gamma=0.9), by_epoch=False, end=20),
    factor=_schedule('ConstantLR', ['factor'], dict(factor=0.5, end=3), factor=0.2),
    warm_up=Case(
        plan(_WARM, STEPS),
        plan(dict(_WARM, start_factor=0.5, end=12), STEPS),
        ['start_factor: checkpoint 0.1', 'end: checkpoint 7'],
    ),
    eta_max=_schedule('OneCycleLR', ['eta_max'], _CYCLE, eta_max=0.1, pct_start=0.5),
    pct_start=_schedule('OneCycleLR', ['_schedule_phases'], _CYCLE, pct_start=0.5),
    of_momentum=Case(
        plan(STEPS, dict(type='CosineAnnealingMomentum', T_max=4, eta_min=0.5), kind='AdamW'),
        plan(STEPS, dict(type='CosineAnnealingMomentum', T_max=4, eta_min=0.6), kind='AdamW'),
        ['param_scheduler[1] (CosineAnnealingMomentum).eta_min: checkpoint 0.5'],
    ),
    converted=_schedule(
        'CosineAnnealingLR',
        ['T_max: checkpoint 20'],
        dict(T_max=4, convert_to_iter_based=True),
        T_max=3,
    ),
    of_a_user=_schedule('Zigzag', ['(Zigzag).low: checkpoint 0.5'], dict(low=0.5), low=0.8),
)

#: A longer run, whose defaults follow: the rates are the config's in any case.
LONGER = dict(
    longer_poly=_longer(
        _POLY, said=['end: checkpoint 4, config 6 (taken, as the length of training says)']
    ),
    longer_poly_by_iter=_longer(dict(_POLY, by_epoch=False), by_epoch=False),
    longer_finished=_longer(_POLY, stop=20),
    longer_linear=_longer(dict(type='LinearLR', start_factor=1.0, end_factor=0.1)),
    longer_cosine=_longer(dict(type='CosineAnnealingLR', eta_min=0.0), stop=10),
    longer_cycle=_longer(dict(type='OneCycleLR', eta_max=0.05)),
    longer_converted=_longer(dict(_POLY, convert_to_iter_based=True)),
    longer_after_warm_up=_longer(_WARM, dict(_POLY, begin=1), stop=13),
    longer_steps=_longer(dict(STEPS)),
    longer_of_a_user=_longer(dict(type='Zigzag')),
)

#: Settings that differ besides the length: the checkpoint's end stays, too.
LONGER_AND_OTHER = dict(
    lr=Case(
        plan(_POLY),
        plan(_POLY, lr=0.2, length=6),
        [LR + ' (taken)', 'end: checkpoint 4 (taken), config 6'],
        kept=plan(dict(_POLY, end=4), length=6),
    ),
    steps_of_a_cycle=Case(
        plan(dict(type='OneCycleLR', eta_max=0.05, total_steps=4)),
        plan(dict(type='OneCycleLR', eta_max=0.05, total_steps=6), length=6),
        ['total_steps: checkpoint 4 (taken)', 'end: checkpoint 4 (taken)'],
        kept=plan(dict(type='OneCycleLR', eta_max=0.05, total_steps=4, end=4), length=6),
    ),
)

PLATEAU = dict(type='ReduceOnPlateauLR', monitor='loss_error', patience=0, factor=0.5)
_ONE, _OTHER = dict(type='StepLR', step_size=1, gamma=0.5), dict(type='ExponentialLR', gamma=0.9)

#: Those whose checkpoint's states suit the config's schedulers not at all.
OTHER_SCHEDULES = dict(
    kind=Case(plan(_ONE), plan(_OTHER), ['StepLR', 'ExponentialLR']),
    one_more=Case(plan(STEPS), plan(_WARM, STEPS), ['MultiStepLR', 'LinearLR']),
    none_before=Case(plan(), plan(_ONE), ['param_scheduler', 'StepLR']),
    none_any_more=Case(plan(_ONE), plan(), ['StepLR', '[]']),
    rate_and_momentum=Case(
        plan(_ONE), plan(dict(_ONE, type='StepMomentum')), ['StepLR', 'StepMomentum']
    ),
)
