"""Classes of a repository's own in the places of MMEngine's: ours are put under them."""

import re
import shutil
from functools import partial

import pytest
import torch
from mmengine.config import Config
from mmengine.hooks import CheckpointHook, Hook, IterTimerHook, LoggerHook
from mmengine.optim import AmpOptimWrapper, DefaultOptimWrapperConstructor, OptimWrapper
from mmengine.registry import (
    HOOKS,
    LOG_PROCESSORS,
    LOOPS,
    MODEL_WRAPPERS,
    MODELS,
    OPTIM_WRAPPER_CONSTRUCTORS,
    OPTIM_WRAPPERS,
    OPTIMIZERS,
    RUNNERS,
)
from mmengine.runner import IterBasedTrainLoop, LogProcessor, Runner

from mmdevplug import (
    DeviceDistributedDataParallel,
    DeviceRunner,
    follow_runner_type,
    init_device,
    registry,
)
from mmdevplug.checkpoint import participants
from mmdevplug.data.padding import padded_forward
from mmdevplug.errors import DevPlugError, ModelError
from mmdevplug.patches.load_weights import load_weights
from mmdevplug.registry import class_of, ours_for
from tests.checkpoint.training import NoisyModel, build, config, train
from tests.columns import NATIVE, job_of, lazy
from tests.jobs import (
    largest_difference,
    load_file,
    log_of,
    note,
    torch_before,
    trained_weights,
    weights_of,
)
from tests.ranks import RanksFailed, errors_of_ranks, in_ranks, run_ranks

# the table -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('registry_of', 'name', 'module'),
    [
        (HOOKS, 'CheckpointHook', 'mmengine.hooks'),
        (HOOKS, 'EmptyCacheHook', 'mmengine.hooks'),
        (HOOKS, 'IterTimerHook', 'mmengine.hooks'),
        (HOOKS, 'ProfilerHook', 'mmengine.hooks'),
        (LOG_PROCESSORS, 'LogProcessor', 'mmengine.runner'),
        (LOOPS, 'IterBasedTrainLoop', 'mmengine.runner'),
        (RUNNERS, 'Runner', 'mmengine.runner'),
        (OPTIM_WRAPPERS, 'OptimWrapper', 'mmengine.optim'),
        (OPTIM_WRAPPERS, 'AmpOptimWrapper', 'mmengine.optim'),
        (MODEL_WRAPPERS, 'MMDistributedDataParallel', 'mmengine.model'),
        (MODEL_WRAPPERS, 'MMSeparateDistributedDataParallel', 'mmengine.model'),
        (MODEL_WRAPPERS, 'DistributedDataParallel', 'torch.nn.parallel'),
    ],
)
def test_every_way_to_name_a_class_leads_to_ours(registry_of, name, module):
    bare = class_of(registry_of, name)
    assert class_of(registry_of, f'mmengine.{name}') is bare
    assert class_of(registry_of, f'{module}.{name}') is bare
    assert class_of(registry_of, bare) is bare
    ours = ours_for(bare)
    assert ours.__module__.startswith('mmdevplug.')
    assert issubclass(ours, bare)
    assert ours_for(ours) is ours
    own = type('Own', (bare,), {})
    made = ours_for(own)
    assert made is ours_for(own)
    assert made.__name__ == 'Own'
    assert made.__mro__.index(own) < made.__mro__.index(ours) < made.__mro__.index(bare)


def test_what_is_unknown_or_not_in_the_table_stays():
    assert class_of(HOOKS, 'NoSuchHook') is None
    assert class_of(HOOKS, None) is None
    assert ours_for(LoggerHook) is LoggerHook
    apex = class_of(OPTIM_WRAPPERS, 'ApexOptimWrapper')  # MMEngine's own, for CUDA alone
    assert ours_for(apex) is apex


class PassesBy(CheckpointHook):
    def before_train(self, runner):
        self.called = True

    def before_run(self, runner):  # which MMEngine's hook does not have
        self.ran = True


def test_a_method_that_does_not_reach_ours_is_named_once(monkeypatch):
    messages, ours = [], ours_for(CheckpointHook)
    monkeypatch.setattr(registry, 'log_warning', messages.append)
    monkeypatch.setattr(ours, 'before_run', lambda self, runner: runner.append('ours'))
    hook, calls = ours_for(PassesBy)(), []
    hook.before_train(None)
    hook.before_train(None)
    assert hook.called
    assert len(messages) == 1
    assert messages[0].startswith(
        'PassesBy.before_train() does not call super().before_train(): a resumed run does not go '
    )
    hook.before_run(calls)
    assert hook.ran
    assert calls == ['ours']
    assert len(messages) == 1


class StepsItself(AmpOptimWrapper):
    def step(self, **kwargs):
        self.stepped = True


class SeedsItself(Runner):
    def set_randomness(self, seed):
        torch.manual_seed(seed)

    def _init_model_weights(self):
        self.model.init_weights()


@pytest.mark.parametrize(
    ('kind', 'name', 'arguments', 'lost'),
    [
        (StepsItself, 'step', [], 'ranks may not skip the same updates'),
        (SeedsItself, 'set_randomness', [5], 'random generators of the device may not be seeded'),
        (SeedsItself, '_init_model_weights', [], 'ranks may begin with other weights'),
    ],
)
def test_what_a_method_loses_is_said(monkeypatch, kind, name, arguments, lost):
    messages = []
    monkeypatch.setattr(registry, 'log_warning', messages.append)
    made = object.__new__(ours_for(kind))
    made.model = NoisyModel()
    getattr(made, name)(*arguments)
    assert len(messages) == 1
    assert f'{kind.__name__}.{name}() does not call super().{name}(): {lost}' in messages[0]


class PastOurs(IterTimerHook):
    def __init__(self):
        Hook.__init__(self)


class AmpPastOurs(AmpOptimWrapper):
    def __init__(self):
        self.mine = True


def test_a_constructor_that_passes_ours_by_leaves_the_class_or_is_refused(monkeypatch):
    messages = []
    monkeypatch.setattr(registry, 'log_warning', messages.append)
    assert type(ours_for(PastOurs)()) is PastOurs
    assert 'PastOurs: its constructor does not call super().__init__()' in messages[0]
    with pytest.raises(DevPlugError, match=r'AmpPastOurs: .* Expected super\(\).__init__'):
        ours_for(AmpPastOurs)()


# runners -------------------------------------------------------------------------------------


@RUNNERS.register_module(force=True)
class OwnRunner(Runner):
    def build_optim_wrapper(self, optim_wrapper):
        self.mine = True
        return super().build_optim_wrapper(optim_wrapper)


@in_ranks()
def test_a_runner_of_ones_own_and_one_built_by_hand(tmp_path):
    follow_runner_type()
    cfg = Config(config(tmp_path, length=1, train_dataloader__batch_size=2))
    built = {}
    for name in ('OwnRunner', 'Runner'):
        cfg.runner_type = name
        built[name] = RUNNERS.build(cfg)
    names = ('model', 'work_dir', 'train_dataloader', 'train_cfg', 'optim_wrapper')
    given = {name: cfg[name] for name in names}
    built['hand'] = OwnRunner(default_scope='mmengine', cfg=cfg, **given)
    other = cfg.copy()
    other.pop('accelerator')
    other.runner_type = 'Runner'
    built['stock'] = Runner(default_scope='mmengine', cfg=other, **given)
    for name in ('OwnRunner', 'hand'):
        built[name].train()
    found = {
        name: (type(each).__name__, isinstance(each, DeviceRunner), hasattr(each, 'mine'))
        for name, each in built.items()
    }
    assert found == dict(
        OwnRunner=('OwnRunner', True, True),
        Runner=('DeviceRunner', True, False),
        hand=('OwnRunner', True, True),
        stock=('Runner', False, False),
    )


@RUNNERS.register_module(force=True)
class BuildsItself(Runner):
    """Its methods do what MMEngine's do, and do not call them."""

    def register_hooks(self, default_hooks=None, custom_hooks=None):
        self.register_default_hooks(default_hooks)
        self.register_custom_hooks(custom_hooks or [])

    def build_model(self, model):
        return MODELS.build(model)

    def build_param_scheduler(self, scheduler):
        return self._build_param_scheduler(scheduler, self.optim_wrapper)


def train_with_runner(accelerator, work_dir, kind, options):
    runner = build(work_dir, accelerator, runner_type=kind, length=1, **options)
    runner.train()
    hooks = sorted({type(hook).__name__ for hook in runner.hooks})
    return hooks, runner.resume_state.scheduler_config


def compare_runners(accelerator, tmp_path, **options):
    job = partial(run_ranks, train_with_runner, 2, accelerator, **job_of(accelerator))
    (hooks, schedulers), *_ = job(tmp_path / 'own', 'BuildsItself', options)
    (expected, their_schedulers), *_ = job(tmp_path, 'DeviceRunner', options)
    assert hooks == expected
    assert len(schedulers) == len(their_schedulers) == 2
    own, theirs = (load_file(path / 'epoch_1.pth') for path in (tmp_path / 'own', tmp_path))
    assert own['state_dict'].keys() == theirs['state_dict'].keys()
    for name, weight in theirs['state_dict'].items():
        assert torch.equal(own['state_dict'][name], weight), name


@pytest.mark.parametrize('accelerator', ['cpu', 'zeta', lazy('lazy')])
def test_a_runner_that_builds_in_its_own_way_loses_nothing(tmp_path, accelerator):
    compare_runners(accelerator, tmp_path)


@pytest.mark.skipif(torch_before('2.13.0'), reason='sharding cards needs PyTorch 2.13')
@pytest.mark.parametrize('accelerator', ['cpu', NATIVE])
def test_a_model_that_a_runner_builds_in_its_own_way_is_sharded(tmp_path, accelerator):
    # With a seed for each rank, one that builds a whole model has drawn other numbers.
    seed = dict(seed=5)
    compare_runners(accelerator, tmp_path, sharding=True, custom_hooks=[], randomness=seed)


@in_ranks()
def test_pad_to_counts_for_a_model_that_a_runner_builds_itself(tmp_path):
    runner = build(tmp_path, runner_type='BuildsItself', accelerator__pad_to=8)
    assert padded_forward(runner.model.data_preprocessor) is not None


@pytest.mark.parametrize(
    ('key', 'meant'),
    [
        ('acelerator', 'accelerator'),
        ('shardng', 'sharding'),
        ('find_unused_paramters', 'find_unused_parameters'),
    ],
)
def test_a_key_that_is_nearly_ours_is_refused(tmp_path, key, meant):
    with pytest.raises(RanksFailed, match=f"has the key '{key}'.*did you mean '{meant}'"):
        run_ranks(partial(build, **{key: True}), 0, tmp_path)


# train_step ----------------------------------------------------------------------------------


@MODELS.register_module(force=True)
class TwoSteps(NoisyModel):
    """Two updates for each batch, the second through a part of the model alone."""

    def train_step(self, data, optim_wrapper):
        for factor in (1.0, 0.1):
            with optim_wrapper.optim_context(self):
                losses = self._run_forward(self.data_preprocessor(data, True), mode='loss')
            loss, log_vars = self.parse_losses(losses)
            optim_wrapper.update_params(loss * factor)
        return log_vars


@MODELS.register_module(force=True)
class StepsAlone(NoisyModel):
    def train_step(self, data, optim_wrapper):
        loss, log_vars = self.parse_losses(
            self._run_forward(self.data_preprocessor(data, True), mode='loss')
        )
        loss.backward()
        optim_wrapper.optimizer.step()
        return log_vars


@MODELS.register_module(force=True)
class Diverges(TwoSteps):
    def parse_losses(self, losses):
        loss, log_vars = super().parse_losses(losses)
        return loss * (float('nan') if torch.distributed.get_rank() == 1 else 1.0), log_vars


@OPTIMIZERS.register_module(force=True)
class Climbs(torch.optim.SGD):
    """Updates by two methods, as optimizers for sharpness-aware minimization do."""

    @torch.no_grad()
    def first_step(self):
        for parameter in self.param_groups[0]['params']:
            self.state[parameter]['before'] = parameter.clone()
            parameter.add_(parameter.grad, alpha=0.05)

    @torch.no_grad()
    def second_step(self):
        for parameter in self.param_groups[0]['params']:
            parameter.copy_(self.state[parameter].pop('before'))
        super().step()


@OPTIM_WRAPPERS.register_module(force=True)
class ClimbsFirst(OptimWrapper):
    def update_params(self, loss, first=True):
        self.zero_grad()
        self.backward(loss)
        self.optimizer.first_step() if first else self.optimizer.second_step()


@MODELS.register_module(force=True)
class StepsTwice(NoisyModel):
    def train_step(self, data, optim_wrapper):
        for first in (True, False):
            losses = self._run_forward(self.data_preprocessor(data, True), mode='loss')
            loss, log_vars = self.parse_losses(losses)
            optim_wrapper.update_params(loss, first)
        return log_vars


def take_two_steps(accelerator, work_dir, model):
    model = dict(type=model, norm=False)
    runner = build(work_dir, accelerator, model=model, custom_hooks=[], length=2)
    runner.train()
    return runner.optim_wrapper._inner_count, runner.iter, trained_weights(runner)


@pytest.mark.parametrize('accelerator', ['cpu', 'zeta', NATIVE, lazy('lazy')])
def test_a_train_step_of_ones_own_is_called_on_ranks(tmp_path, accelerator):
    found = run_ranks(take_two_steps, 2, accelerator, tmp_path, 'TwoSteps', **job_of(accelerator))
    for updates, iterations, weights in found:
        assert updates == 2 * iterations > 0
        assert largest_difference(weights, found[0][-1]) == 0.0


@in_ranks(2)
def test_updates_of_a_train_step_of_ones_own_are_those_of_averages():
    """Two updates by the model's own step; and what averaged gradients of both ranks give."""
    context = init_device('pytorch', 'cpu')
    torch.manual_seed(0)
    model, expected = (TwoSteps(dropout=0.0, norm=False) for _ in range(2))
    expected.load_state_dict(model.state_dict())
    wrapped = DeviceDistributedDataParallel(model)
    optim_wrapper = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    batches = [
        dict(inputs=torch.full((2, 8), 1.0 + rank), targets=torch.full((2, 2), 0.5))
        for rank in range(2)
    ]
    data = expected.data_preprocessor(batches[context.env.rank], True)
    wrapped.train_step(data, optim_wrapper)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for factor in (1.0, 0.1):
        optimizer.zero_grad()
        for each in batches:
            losses = expected._run_forward(each, mode='loss')
            (expected.parse_losses(losses)[0] * factor / 2).backward()
        optimizer.step()
    assert largest_difference(weights_of(model), weights_of(expected)) <= 1e-7


@pytest.mark.parametrize(
    ('model', 'told'),
    [
        ('StepsAlone', r'StepsAlone.train_step calls step\(\) of an optimizer'),
        ('Diverges', r'gradients are not finite:\n  rank 1: '),
    ],
)
def test_what_a_train_step_of_ones_own_must_not_do(tmp_path, model, told):
    errors = errors_of_ranks(take_two_steps, 2, 'cpu', tmp_path, model, together=True).values()
    assert any(re.search(told, message) for _, message in errors)
    assert ModelError.__name__ in {kind for kind, _ in errors} <= {'ModelError', 'RankFailedError'}


def climb(accelerator, work_dir):
    cfg = dict(type='ClimbsFirst', optimizer=dict(type='Climbs', lr=0.1))
    options = dict(custom_hooks=[], length=2, optim_wrapper=cfg)
    build(work_dir, accelerator, model=dict(type='StepsTwice', norm=False), **options).train()
    return log_of(work_dir) if torch.distributed.get_rank() == 0 else ''


def test_updates_without_an_average_are_named(tmp_path):
    log, _ = run_ranks(climb, 2, 'cpu', tmp_path)
    # Twice two epochs' iterations, and one warning.
    assert re.findall(r'(\w+).train_step updates (net.0.weight, \S+)', log) == [
        ('StepsTwice', 'net.0.weight, net.0.bias,')
    ]


# optimizer wrappers, processors, hooks that are built ----------------------------------------


@OPTIM_WRAPPERS.register_module(force=True)
class OwnAmp(AmpOptimWrapper):
    updates = 0

    def update_params(self, *args, **kwargs):
        super().update_params(*args, **kwargs)
        self.updates += 1


@LOG_PROCESSORS.register_module(force=True)
class OwnProcessor(LogProcessor):
    pass


@HOOKS.register_module(force=True)
class OwnTimer(IterTimerHook):
    pass


@pytest.mark.parametrize('accelerator', ['cpu', 'zeta'])
@in_ranks()
def test_own_optimizer_wrapper_log_processor_and_timer(tmp_path, accelerator):
    runner = build(
        tmp_path,
        accelerator,
        length=1,
        optim_wrapper=dict(type='OwnAmp', dtype='bfloat16', optimizer=dict(type='SGD', lr=0.01)),
        log_processor=dict(type='OwnProcessor', average_losses=True),
        default_hooks=dict(timer=dict(type='OwnTimer')),
    )
    runner.train()
    runner.register_hook(CheckpointHook(interval=1))
    timer = next(hook for hook in runner.hooks if isinstance(hook, OwnTimer))
    bases = [
        kind.__name__ for each in (runner.log_processor, timer) for kind in type(each).__mro__
    ]
    assert runner.optim_wrapper.updates == runner.iter
    assert {'DeviceLogProcessor', 'DeviceIterTimerHook'} <= set(bases)
    told = 'CheckpointHook was not built by the runner, so SafeCheckpointHook does not'
    assert told in log_of(tmp_path)


# weights -------------------------------------------------------------------------------------


@MODELS.register_module(force=True)
class Adapted(NoisyModel):
    """Saves some of its weights, something else, and a buffer that a hook brings up to date."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.register_buffer('late', torch.zeros(1))
        if hasattr(self, 'register_state_dict_pre_hook'):
            self.register_state_dict_pre_hook(lambda model, *_: model.late.fill_(7.0))

    def state_dict(self, *args, **kwargs):
        whole = super().state_dict(*args, **kwargs)
        whole.pop('net.0.weight')
        whole['bank'] = torch.ones(3)
        return whole


def save_adapted(work_dir):
    runner = build(work_dir, model=dict(type='Adapted'), length=1, custom_hooks=[])
    runner.train()
    model = getattr(runner.model, 'module', runner.model)
    saved = load_file(work_dir / 'epoch_1.pth')['state_dict']
    return sorted(saved), sorted(model.state_dict()), float(saved['late'])


@pytest.mark.parametrize('ranks', [0, 2])
def test_a_checkpoint_has_what_state_dict_returns(tmp_path, ranks):
    saved, of_model, late = run_ranks(save_adapted, ranks, tmp_path)[0]
    assert saved == of_model
    assert 'net.0.weight' not in saved
    assert 'bank' in saved
    assert late == (7.0 if hasattr(torch.nn.Module, 'register_state_dict_pre_hook') else 0.0)


@MODELS.register_module(force=True)
class HooksOnce(NoisyModel):
    """Registers a hook in its first step, as transformers 5 does, and notes it under two names."""

    _hook_installed = False
    inited = False

    def forward(self, *args, **kwargs):
        if not self._hook_installed:
            self.seen = []
            self.net[0].register_forward_hook(lambda *_: self.seen.append(1))
            self._hook_installed = self.inited = True
        self.seen.clear()
        result = super().forward(*args, **kwargs)
        assert len(self.seen) == 1, 'the hook was not registered, or twice'
        return result


def test_what_a_process_has_yet_to_do_is_not_taken_for_done(tmp_path):
    options = dict(model=dict(type='HooksOnce'), custom_hooks=[], log_level='INFO')
    train(tmp_path, length=1, **options)
    train(tmp_path, length=2, resume=True, **options)
    log = max(tmp_path.glob('*/*.log')).read_text()
    assert 'Not restored: model._hook_installed=True.' in log
    assert 'inited' not in log


class AllArguments(NoisyModel):
    def state_dict(self, destination, prefix, keep_vars):  # as Rein's backbone has it
        return super().state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)


def test_weights_are_loaded_into_a_module_whose_state_dict_takes_three_arguments():
    model = AllArguments()
    weights = NoisyModel().state_dict()
    assert load_weights(model, weights).complete
    assert torch.equal(model.net[0].weight, weights['net.0.weight'])


class Switches(Hook):
    """Replaces the loader in an epoch, or from it on, as hooks that switch pipelines do."""

    def __init__(self, config, epochs=(1,)):
        self.config, self.epochs = config, epochs

    def before_train_epoch(self, runner):
        if runner.epoch in self.epochs:
            runner.train_loop.dataloader = Runner.build_dataloader(self.config, seed=0)


def test_a_loader_that_a_hook_replaces_is_named(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(participants, 'log_warning', told.append)
    runner = build(tmp_path, length=2, custom_hooks=[])
    runner.register_hook(Switches(runner._train_dataloader))
    runner.train()
    assert len(told) == 1
    assert 'train_loader (replaced while training)' in told[0]


@pytest.mark.parametrize('epochs', [(1,), (1, 2)])
def test_a_resumed_run_names_a_loader_that_is_not_replaced_again(tmp_path, monkeypatch, epochs):
    for length in (2, 3):
        told = []
        monkeypatch.setattr(participants, 'log_warning', told.append)
        runner = build(tmp_path, length=length, custom_hooks=[], resume=length == 3)
        runner.register_hook(Switches(runner._train_dataloader, epochs))
        runner.train()
    named = [line for line in told if 'reads the one of the config again' in line]
    assert len(named) == (2 not in epochs)


# loops ---------------------------------------------------------------------------------------


@LOOPS.register_module(force=True)
class OwnRun(IterBasedTrainLoop):
    """A ``run`` without the part that drops batches, or with one of its own."""

    def __init__(self, *args, drops=False, **kwargs):
        super().__init__(*args, **kwargs)
        self.drops = drops

    def run(self):
        self.runner.call_hook('before_train')
        self.runner.call_hook('before_train_epoch')
        for _ in range(self._iter if self.drops else 0):
            next(self.dataloader_iterator)
        while self._iter < self._max_iters:
            self.runner.model.train()
            self.run_iter(next(self.dataloader_iterator))
        self.runner.call_hook('after_train_epoch')
        self.runner.call_hook('after_train')
        return self.runner.model


@LOOPS.register_module(force=True)
class CallsMMEngines(IterBasedTrainLoop):
    def run(self):
        return super().run()


def run_by_iterations(work_dir, length, resume=False, **loop):
    without = dict(val_cfg=None, val_dataloader=None, val_evaluator=None, param_scheduler=None)
    found = train(
        work_dir,
        by_epoch=False,
        train_cfg=dict(loop, max_iters=length),
        checkpoint=dict(by_epoch=False, interval=4),
        resume=resume,
        **without,
    )
    return found['weights'], max(work_dir.glob('*/*.log')).read_text()


@pytest.mark.parametrize(
    ('kind', 'options', 'exact'),
    [('OwnRun', {}, True), ('CallsMMEngines', {}, True), ('OwnRun', dict(drops=True), False)],
)
def test_a_loop_with_a_run_of_its_own_goes_on(tmp_path, kind, options, exact):
    run = partial(run_by_iterations, type=kind)
    ((whole, _),) = run_ranks(run, 0, tmp_path / 'a', 8)
    run_ranks(run, 0, tmp_path / 'b', 4)
    ((found, log),) = run_ranks(partial(run, resume=True, **options), 0, tmp_path / 'b', 8)
    assert (largest_difference(whole, found) == 0.0) == exact
    assert ('OwnRun.run() has dropped 4 batches' in log) != exact


def test_two_checkpoint_hooks_write_and_either_resumes(tmp_path):
    by_iteration = dict(
        type='CheckpointHook', by_epoch=False, interval=5, filename_tmpl='it_{}.pth'
    )
    run = partial(train, length=2, custom_hooks=[by_iteration])
    (whole,) = run_ranks(run, 0, tmp_path / 'whole')
    written = ('epoch_1.pth', 'epoch_2.pth', 'it_5.pth', 'it_10.pth', 'it_15.pth')
    assert {*written} <= {each.name for each in (tmp_path / 'whole').glob('*.pth')}
    for name in ('epoch_1.pth', 'it_5.pth', 'it_15.pth'):
        (tmp_path / name).mkdir()
        shutil.copy(tmp_path / 'whole' / name, tmp_path / name)
        (found,) = run_ranks(partial(run, resume=True), 0, tmp_path / name)
        assert found['iter'] == whole['iter']
        assert largest_difference(whole['weights'], found['weights']) == 0.0, name


def test_iterations_that_are_resumed_by_epochs(tmp_path):
    options = dict(by_epoch=False, length=20, checkpoint=dict(by_epoch=False, interval=20))
    options['train_dataloader__sampler__type'] = 'DefaultSampler'
    run_ranks(partial(train, **options), 0, tmp_path)
    ((first, last, log),) = run_ranks(count_epochs, 0, tmp_path)
    assert 'whose train_cfg counts iterations, with one that counts epochs' in log
    length = last + 1
    assert first == (20 // (length // 3), 20 % (length // 3), 20)


def count_epochs(work_dir):
    runner = build(work_dir, length=3, resume=True)
    seen = note(
        runner,
        'before_train_iter',
        lambda runner, batch_idx, **_: (runner.epoch, batch_idx, runner.iter),
    )
    runner.train()
    return seen[0], seen[-1][-1], max(work_dir.glob('*/*.log')).read_text()


@MODELS.register_module(force=True)
class NamesCuda(NoisyModel):
    def forward(self, inputs, *args, **kwargs):
        return super().forward(inputs.to('cuda:0'), *args, **kwargs)


@OPTIM_WRAPPER_CONSTRUCTORS.register_module(force=True)
class BuildsPlain(DefaultOptimWrapperConstructor):
    """Takes neither the class nor the config that it is given."""

    kind = OptimWrapper

    def __call__(self, model):
        return self.kind(
            optimizer=torch.optim.SGD(model.parameters(), 0.01), clip_grad=dict(max_norm=1.0)
        )


@OPTIM_WRAPPER_CONSTRUCTORS.register_module(force=True)
class BuildsMixed(BuildsPlain):
    kind = AmpOptimWrapper


def train_in_place(work_dir, accelerator, options):
    train(work_dir, accelerator, **options)
    return log_of(work_dir)


@pytest.mark.skipif(torch.cuda.is_available(), reason='is about machines without CUDA')
@pytest.mark.parametrize('accelerator', ['cpu', 'zeta'])
@pytest.mark.parametrize(
    ('options', 'line'),
    [
        (dict(model=dict(type='NamesCuda')), r"\.to\('cuda:0'\).*Take the device of an input"),
        (
            dict(
                optim_wrapper=dict(constructor='BuildsMixed', optimizer=dict(type='SGD', lr=0.01))
            ),
            r'self\.kind\(.*Build mmdevplug\.optim\.DeviceAmpOptimWrapper there',
        ),
    ],
    ids=['model', 'constructor'],
)
def test_a_line_that_asks_for_cuda_is_named(tmp_path, accelerator, options, line):
    with pytest.raises(RanksFailed, match=f'asks for CUDA.*The line: `.*{line}'):
        run_ranks(train_in_place, 0, tmp_path, accelerator, options)


@pytest.mark.parametrize(('accelerator', 'is_lost'), [('cpu', False), lazy('lazy', True)])
def test_an_optimizer_wrapper_that_a_constructor_builds_itself(tmp_path, accelerator, is_lost):
    wrapper = dict(constructor='BuildsPlain', optimizer=dict(type='SGD', lr=0.01))
    options = dict(optim_wrapper=wrapper, length=1)
    (log,) = run_ranks(train_in_place, 0, tmp_path, accelerator, options, **job_of(accelerator))
    assert ('OptimWrapper was not built by the runner, so DeviceOptimWrapper' in log) == is_lost
