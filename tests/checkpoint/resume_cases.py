"""What is trained, interrupted and resumed: MMEngine's schedulers, optimizers, hooks, samplers."""

from inspect import signature

import numpy as np
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.registry import HOOKS, MODELS, OPTIMIZERS
from torch import nn

from tests.checkpoint.resuming import LENGTH
from tests.features import parts  # noqa: F401  registers EachChild
from tests.jobs import torch_before

#: Arguments of each kind of schedule; times are parts of the whole training.
SCHEDULES = dict(
    Constant=dict(factor=0.5, end=0.5),
    CosineAnnealing=dict(T_max=1.0, eta_min=0.001),
    CosineRestart=dict(periods=[0.25, 0.25, 0.5], restart_weights=[1, 0.5, 0.25], eta_min=0.001),
    Exponential=dict(gamma=0.8),
    Linear=dict(start_factor=0.1, end=0.75),
    MultiStep=dict(milestones=[0.25, 0.75], gamma=0.5),
    OneCycle=dict(eta_max=0.05, total_steps=1.0),
    Poly=dict(power=0.9, eta_min=0.001, end=1.0),
    ReduceOnPlateau=dict(monitor='loss_error', rule='less', patience=0, factor=0.7),
    Step=dict(step_size=0.25, gamma=0.6),
)
_TIMES = ('end', 'T_max', 'periods', 'milestones', 'total_steps', 'step_size')

#: Those that have a tensor in their defaults or a state of their own. LBFGS needs a closure, which
#: MMEngine's wrappers do not give it, SparseAdam sparse gradients.
OPTIMIZER_OPTIONS = dict(
    SGD=dict(lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
    Adam=dict(lr=0.02, amsgrad=True, weight_decay=1e-3),
    AdamW=dict(lr=0.02),
    Adamax=dict(lr=0.02, weight_decay=1e-3),
    NAdam=dict(lr=0.02, weight_decay=1e-3),
    RAdam=dict(lr=0.02, weight_decay=1e-3),
    ASGD=dict(lr=0.02, t0=5, weight_decay=1e-3),
    Adadelta=dict(lr=0.5, weight_decay=1e-3),
    Adagrad=dict(lr=0.05, lr_decay=0.01, weight_decay=1e-3),
    RMSprop=dict(lr=0.01, momentum=0.9, centered=True, weight_decay=1e-3),
    Rprop=dict(lr=0.01),
    TorchAdafactor=dict(lr=0.02, weight_decay=1e-3),
    Adafactor=dict(lr=0.02, relative_step=False, scale_parameter=False, weight_decay=1e-3),
    Muon=dict(lr=0.02),
    Lion=dict(lr=0.002, weight_decay=1e-3),
    DAdaptAdam=dict(lr=1.0, weight_decay=1e-3),
    DAdaptSGD=dict(lr=1.0, momentum=0.9, weight_decay=1e-3),
    DAdaptAdaGrad=dict(lr=1.0, weight_decay=1e-3),
)


def optimizers():
    """The names of those that are installed."""
    return [name for name in OPTIMIZER_OPTIONS if name in OPTIMIZERS]


#: What a step of a schedule is: an epoch; an iteration; iterations that MMEngine makes of epochs.
COUNTING = ('epochs', 'iterations', 'converted')


def schedule(kind, optimizer, counting):
    """The schedulers of a kind: of the learning rate, of the momentum, and of the weight decay.

    Args:
        kind (str): A key of `SCHEDULES`.
        optimizer (dict): The config of the optimizer.
        counting (str): One of `COUNTING`.
    """
    by_epoch = counting != 'iterations'
    whole = LENGTH // 5 if by_epoch else LENGTH
    options = dict(by_epoch=by_epoch)
    for name, value in SCHEDULES[kind].items():
        if name in _TIMES:
            many = [int(part * whole) for part in np.atleast_1d(value)]
            value = many if isinstance(value, list) else many[0]
        options[name] = value
    if counting == 'converted':
        options['convert_to_iter_based'] = True
    found = [dict(options, type=f'{kind}LR')]
    if kind == 'OneCycle':
        return found
    knows = OPTIMIZER_OPTIONS[optimizer['type']]
    if 'momentum' in knows or 'betas' in signature(OPTIMIZERS.get(optimizer['type'])).parameters:
        found.append(dict(options, type=f'{kind}Momentum'))
    if 'weight_decay' in knows:
        found.append(dict(options, type=f'{kind}ParamScheduler', param_name='weight_decay'))
    for each in found[1:]:  # of values that are near 1, or tiny
        if kind.startswith('Cosine'):
            del each['eta_min']
            each['eta_min_ratio'] = 0.5
    return found


def scheduled(kind, optimizer, counting='epochs', **more):
    """A training with a schedule and an optimizer."""
    config = dict(OPTIMIZER_OPTIONS[optimizer], type=optimizer)
    options = dict(
        by_epoch=counting != 'iterations',
        optim_wrapper__optimizer=config,
        param_scheduler=schedule(kind, config, counting),
        **more,
    )
    if optimizer == 'Muon':  # which takes matrices alone
        options['model'] = dict(type='NoisyModel', bias=False, norm=False)
    return options


# parts of their own -----------------------------------------------------------------------------


@HOOKS.register_module(force=True)
class FillsTheHub(Hook):
    """Puts values of many types into the message hub, and uses them."""

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        hub = runner.message_hub
        count = hub.get_info('count') if 'count' in hub.runtime_info else 0
        hub.update_info('count', count + 1)
        hub.update_info('numbers', dict(a=[np.float32(count), np.arange(3)], b=(1, {2})))
        hub.update_info('tensor', outputs['loss'].detach().clone())
        hub.update_info('not kept', object(), resumed=False)
        hub.update_scalar('train/double', 2.0 * count, count=2)
        hub.update_scalar('train/not_kept', 1.0, resumed=False)


@HOOKS.register_module(force=True)
class Remembers(Hook):
    """A user's hook with a state, on which training depends."""

    priority = 'LOWEST'

    def __init__(self):
        self.total, self.validations = 0.0, 0

    def state_dict(self):
        return dict(total=self.total, validations=self.validations)

    def load_state_dict(self, state):
        self.total, self.validations = state['total'], state['validations']

    def after_val_epoch(self, runner, metrics=None):
        self.validations += 1
        runner.message_hub.update_info('validations', self.validations)

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.total += float(outputs['loss'])
        runner.message_hub.update_scalar('train/total', self.total)


@HOOKS.register_module(force=True)
class StopsEarly(Hook):
    """Notes how patient EarlyStoppingHook is."""

    priority = 'LOWEST'

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        assert state == {}

    def after_val_epoch(self, runner, metrics=None):
        (hook,) = (hook for hook in runner.hooks if type(hook).__name__ == 'EarlyStoppingHook')
        runner.message_hub.update_info('patience', [hook.wait_count, float(hook.best_score)])


@MODELS.register_module(force=True)
class TwoParts(BaseModel):
    """A model that takes turns in training two parts with an optimizer each."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.first = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2))
        self.second = nn.Linear(8, 2)

    def forward(self, inputs, targets=None, mode='tensor'):
        outputs = self.second(self.first(inputs).tanh())
        if mode == 'loss':
            return dict(loss=nn.functional.mse_loss(outputs, targets))
        return [dict(error=error) for error in (outputs - targets).abs().mean(dim=1)]

    def train_step(self, data, optim_wrapper):
        data = self.data_preprocessor(data, True)
        for name, other in (('first', 'second'), ('second', 'first')):
            # Nobody would set gradients of the other to zero, and none are saved.
            getattr(self, name).requires_grad_(True)
            getattr(self, other).requires_grad_(False)
            loss = self(**data, mode='loss')['loss']
            optim_wrapper[name].update_params(loss)
        return dict(loss=loss.detach())


# cases ------------------------------------------------------------------------------------------


def two_optimizers(second):
    """A training of two parts with an optimizer each, of which the second has this schedule."""
    return dict(
        model=dict(type='TwoParts'),
        optim_wrapper=dict(
            constructor='EachChild',
            first=dict(type='OptimWrapper', optimizer=dict(type='SGD', lr=0.1, momentum=0.9)),
            second=dict(type='OptimWrapper', optimizer=dict(type='Adam', lr=0.01)),
        ),
        param_scheduler=dict(first=[dict(type='MultiStepLR', milestones=[1, 3])], second=[second]),
        custom_hooks=[],
    )


def _amp(dtype, **options):
    return dict(
        optim_wrapper__type='AmpOptimWrapper',
        optim_wrapper__dtype=dtype,
        by_epoch=False,
        **options,
    )


def _ema(**options):
    return dict(custom_hooks=[dict(type='EMAHook', momentum=0.1, **options)])


def _loader(by_epoch=True, **options):
    loader = {f'train_dataloader__{name}': value for name, value in options.items()}
    return dict(loader, by_epoch=by_epoch)


def _default(**options):
    return dict(type='DefaultSampler', **options)


_RANDOM = dict(type='GlobalRandomSampler')
_PERSISTENT = dict(num_workers=1, persistent_workers=True)
_VALIDATES_WITH_WORKERS = dict(
    val_dataloader__num_workers=1, val_dataloader__persistent_workers=True
)
_EARLY = dict(type='EarlyStoppingHook', monitor='loss_error', rule='less')
_EVERY_EPOCH = dict(train_cfg__val_interval=1)

#: Everything else of MMEngine's with a state, one case each; for :func:`resuming.tiny`.
OTHERS = dict(
    ema_exponential=_ema(ema_type='ExponentialMovingAverage', update_buffers=True),
    ema_interval=_ema(interval=3, begin_iter=6),
    ema_annealing=_ema(ema_type='MomentumAnnealingEMA', gamma=5, begin_epoch=2),
    ema_stochastic=dict(
        custom_hooks=[dict(type='EMAHook', ema_type='StochasticWeightAverage', interval=2)]
    ),
    fp16=_amp('float16', optim_wrapper__loss_scale=dict(init_scale=256.0, growth_interval=3)),
    fp16_dynamic=_amp('float16', optim_wrapper__loss_scale='dynamic'),
    bf16=_amp('bfloat16'),
    accumulation=dict(
        by_epoch=False,
        optim_wrapper__accumulative_counts=2,
        checkpoint=dict(interval=4, by_epoch=False),
    ),
    two_optimizers=two_optimizers(dict(type='OneCycleLR', eta_max=0.02, total_steps=4)),
    paramwise=dict(
        optim_wrapper__optimizer=dict(type='AdamW', lr=0.02, weight_decay=0.1),
        optim_wrapper__paramwise_cfg=dict(
            norm_decay_mult=0.0, custom_keys={'net.0': dict(lr_mult=0.1)}
        ),
    ),
    several_schedulers=dict(
        param_scheduler=[
            dict(type='LinearLR', start_factor=0.1, by_epoch=False, end=7),
            dict(type='MultiStepLR', milestones=[2, 3], gamma=0.5),
            dict(type='CosineAnnealingMomentum', T_max=4, eta_min=0.5),
        ]
    ),
    best=dict(
        checkpoint=dict(interval=1, save_best=['loss_error'], rule='less', max_keep_ckpts=1),
        **_EVERY_EPOCH,
    ),
    patience=dict(
        custom_hooks=[dict(_EARLY, patience=3, min_delta=9.0), dict(type='StopsEarly')],
        checkpoint=dict(interval=1, save_best='auto', rule='less'),
        **_EVERY_EPOCH,
    ),
    no_patience=dict(
        custom_hooks=[dict(_EARLY, patience=2, min_delta=9.0), dict(type='StopsEarly')],
        checkpoint=dict(interval=5, by_epoch=False),
        train_cfg__val_interval=5,
        by_epoch=False,
    ),
    message_hub=dict(custom_hooks=[dict(type='FillsTheHub')]),
    hook_with_state=dict(
        custom_hooks=[dict(type='Remembers')],
        checkpoint=dict(interval=1, save_best='auto', rule='less'),
        **_EVERY_EPOCH,
    ),
    default_sampler_by_iter=_loader(by_epoch=False, sampler=_default(shuffle=True)),
    default_sampler_in_order=_loader(by_epoch=False, sampler=_default(shuffle=False)),
    default_sampler_uneven=_loader(
        sampler=_default(shuffle=True, round_up=False),
        drop_last=False,
        dataset=dict(type='NoisyDataset', indices=18),
    ),
    infinite_in_order=_loader(by_epoch=False, sampler=dict(type='InfiniteSampler', shuffle=False)),
    random_sampler=_loader(sampler=_RANDOM),
    random_sampler_by_iter=_loader(by_epoch=False, sampler=_RANDOM),
    workers=dict(_loader(num_workers=2), val_dataloader__num_workers=1, **_EVERY_EPOCH),
    workers_by_iter=_loader(by_epoch=False, num_workers=1),
    random_sampler_with_workers=_loader(by_epoch=False, num_workers=1, sampler=_RANDOM),
    persistent_workers=dict(_loader(**_PERSISTENT), **_VALIDATES_WITH_WORKERS, **_EVERY_EPOCH),
    persistent_workers_by_iter=_loader(
        by_epoch=False, sampler=_default(shuffle=True), **_PERSISTENT
    ),
    intervals_of_validation=dict(
        train_cfg__dynamic_intervals=[(3, 1)], train_cfg__val_begin=2, by_epoch=True
    ),
)
#: Cases that other ranks make different.
OF_SEVERAL_RANKS = dict(
    epochs=dict(),
    iterations=dict(by_epoch=False),
    sync_buffers=dict(custom_hooks=[dict(type='SyncBuffersHook')], **_EVERY_EPOCH),
    multi_step=scheduled('MultiStep', 'SGD'),
    two_optimizers=dict(
        OTHERS['two_optimizers'],
        model_wrapper_cfg=dict(type='DeviceSeparateDistributedDataParallel'),
    ),
    one_cycle=scheduled('OneCycle', 'AdamW', 'iterations'),
    **{
        name: OTHERS[name]
        for name in (
            'ema_exponential',
            'best',
            'patience',
            'hook_with_state',
            'default_sampler_by_iter',
            'random_sampler',
            'persistent_workers',
            'fp16',
        )
    },
)
if torch_before('2.3.0'):  # which has no gradient scaler for the CPU
    for name in ('fp16', 'fp16_dynamic'):
        del OTHERS[name]
    del OF_SEVERAL_RANKS['fp16']
