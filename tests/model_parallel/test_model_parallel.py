"""Models over several cards of a stand-in, against the same training on one."""

import logging
import re
from functools import partial

import pytest
import torch

from mmdevplug.cli.common import load_config
from mmdevplug.cli.train import build_parser
from mmdevplug.errors import PlacementError
from tests.columns import CUDA, within
from tests.jobs import ROOT, install_card, largest_difference, load_file, log_of, messages_of
from tests.parallel_jobs import STEPS, build, train
from tests.ranks import in_ranks, run_ranks

SEGMENTOR = pytest.param('segmentor', marks=pytest.mark.operators)
KINDS = ['classifier', 'llama', 'tied_llama', SEGMENTOR]


def check_equal(one, found, tolerance=1e-6):
    assert len(one['devices']) == 1
    assert found['strategy'] == 'model_parallel'
    assert found['devices'] == [f'zeta:{i}' for i in range(len(found['devices']))]
    assert len(found['devices']) > 1
    assert found['iter'] == one['iter']
    assert found['losses'] == pytest.approx(one['losses'], abs=tolerance)
    assert largest_difference(found['weights'], one['weights']) <= tolerance


def compare(kind, work_dir, counts, **options):
    """Train on one card and on several, and compare losses and weights."""
    one = train(kind, 'zeta', work_dir / '1', **options)
    for count in counts:
        found = train(kind, 'zeta', work_dir / str(count), count, **options)
        assert len(found['devices']) == count
        check_equal(one, found)
    return one


@pytest.mark.parametrize('kind', KINDS)
@in_ranks()
def test_weights_are_those_of_one_device(tmp_path, kind):
    assert compare(kind, tmp_path, (2, 3, 4))['iter'] == STEPS


CLIP = dict(optim_wrapper__clip_grad=dict(max_norm=0.5))
FEATURES = dict(
    clipping=CLIP,
    accumulation=dict(optim_wrapper__accumulative_counts=2),
    ema=dict(custom_hooks=[dict(type='EMAHook', momentum=0.1)]),
    sync_bn=dict(sync_bn='auto'),
    adamw=dict(optim_wrapper__optimizer=dict(_delete_=True, type='AdamW', lr=0.01), **CLIP),
    amp_bf16=dict(optim_wrapper__type='AmpOptimWrapper', optim_wrapper__dtype='bfloat16'),
    amp_fp16=dict(optim_wrapper__type='AmpOptimWrapper', optim_wrapper__dtype='float16', **CLIP),
    checkpointing=dict(activation_checkpointing=['blocks.1', 'blocks.4']),
)


def train_all(work_dir):
    """Each feature on one card and on three."""
    return {
        name: [
            train('classifier', 'zeta', f'{work_dir}/{name}_{count}', count, **options)
            for count in (1, 3)
        ]
        for name, options in FEATURES.items()
    }


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    (found,) = run_ranks(train_all, 0, str(tmp_path_factory.mktemp('features')))
    return found


@pytest.mark.parametrize('feature', FEATURES)
def test_features_across_devices(trained, feature):
    check_equal(*trained[feature])


@pytest.mark.parametrize('strategy', ['auto', 'dynamic'])
@in_ranks()
def test_every_way_to_plan_trains(tmp_path, strategy):
    compare('llama', tmp_path, (3,), parallel=dict(strategy=strategy))


@pytest.mark.parametrize('accelerator', ['zeta', CUDA])
@in_ranks()
def test_a_card_and_the_host(tmp_path, accelerator):
    limits = {f'{accelerator}:0': '4KB'}
    parallel = dict(devices=[f'{accelerator}:0', 'cpu'], exclude_cpu=False, max_memory=limits)
    with messages_of(logging.getLogger('accelerate')) as told:
        one = train('classifier', accelerator, tmp_path / 'one')
        two = train('classifier', accelerator, tmp_path / 'two', 2, parallel=parallel)
    assert not [text for text in told if 'meta device' in text]  # nothing is
    assert two['devices'] == ['cpu', f'{accelerator}:0']
    assert largest_difference(one['weights'], two['weights']) <= within(accelerator, 1e-6)


@in_ranks()
def test_frozen_weights_are_kept_in_the_precision_that_is_computed_in(tmp_path):
    one = train('classifier', 'zeta', tmp_path / 'one', model__frozen=True)
    options = dict(model__frozen=True, parallel=dict(precision='bf16'))
    half = train('classifier', 'zeta', tmp_path / 'half', 2, **options)
    assert half['dtypes'] == [(False, 'torch.bfloat16'), (True, 'torch.float32')]
    assert half['losses'] == pytest.approx(one['losses'], rel=1e-2)
    assert half['losses'] != one['losses']


@pytest.mark.parametrize('kind', ['llama', SEGMENTOR])
def test_two_ranks_of_two_devices_each_are_one_device_with_all_the_data(tmp_path, kind):
    options = {}
    if kind == 'segmentor':  # whose statistics are those of all ranks
        options = dict(sync_bn='auto')
    (one,) = run_ranks(train, 0, kind, 'zeta', tmp_path / 'one')
    found = run_ranks(partial(train, **options), 2, kind, 'zeta', tmp_path / 'two', 2)
    for rank, result in enumerate(found):
        assert result['strategy'] == 'data_and_model_parallel'
        assert result['devices'] == [f'zeta:{2 * rank}', f'zeta:{2 * rank + 1}']
        assert largest_difference(result['weights'], one['weights']) <= 1e-5
    assert largest_difference(found[0]['weights'], found[1]['weights']) == 0


@pytest.mark.parametrize(
    ('before', 'after', 'dropout'), [(3, 2, 0.0), (1, 4, 0.0), (4, 1, 0.0), (2, 2, 0.3)]
)
@in_ranks()
def test_checkpoints_know_no_devices(tmp_path, before, after, dropout):
    """Train half of the way on some devices, and go on on others."""
    options = dict(model__dropout=dropout)
    half = dict(options, train_cfg__max_iters=STEPS // 2)
    half['default_hooks__checkpoint__interval'] = STEPS // 2
    whole = train('classifier', 'zeta', tmp_path / 'whole', before, **options)
    train('classifier', 'zeta', tmp_path / 'cut', before, **half)
    resumed = train('classifier', 'zeta', tmp_path / 'cut', after, resume=True, **options)
    state_dict = load_file(str(tmp_path / f'cut/iter_{STEPS // 2}.pth'))['state_dict']
    assert resumed['iter'] == STEPS
    assert {value.device.type for value in state_dict.values()} == {'cpu'}
    assert sorted(state_dict) == sorted(whole['weights'])
    assert largest_difference(whole['weights'], resumed['weights']) <= 1e-6


# what the log and the runner say -----------------------------------------------------------------


def logged(work_dir, parallel, memory=None):
    install_card('zeta')
    if memory is not None:
        torch.zeta.set_limit(memory)
    runner = build('classifier', 'zeta', work_dir, model_parallel=parallel, log_level='INFO')
    if memory is None:
        runner.train()
    return log_of(work_dir), [str(device) for device in runner.device_context.devices]


@in_ranks()
def test_the_strategy_is_logged_once_with_its_plan(tmp_path):
    log, devices = logged(tmp_path, dict(enable=True, devices=2))
    assert devices == ['zeta:0', 'zeta:1']
    assert log.count('Training strategy') == 1
    assert 'model_parallel' in log
    assert 'imbalance' in log
    assert 'is uneven' not in log


@in_ranks()
def test_an_uneven_plan_is_warned_of_once(tmp_path):
    whole = dict(enable=True, devices=2, no_split=['blocks'])
    log, _ = logged(tmp_path, whole)
    told = re.findall(r'WARNING - (The plan of SpreadClassifier is uneven: .*)', log)
    assert len(told) == 1
    assert 'blocks of' in told[0]


@pytest.mark.parametrize(
    ('memory', 'count', 'words'),
    [
        (2**20, 1, 'one device is faster'),
        (40_000, 4, 'without activations'),
        (None, 4, 'not known'),
    ],
)
@in_ranks()
def test_none_depends_on_what_training_needs(tmp_path, memory, count, words):
    log, devices = logged(tmp_path, dict(enable=None), memory)
    assert len(devices) == count
    assert words in log


@in_ranks()
def test_none_takes_one_device_where_the_model_has_too_few_parts(tmp_path):
    log, devices = logged(tmp_path, dict(enable=None, no_split=['SpreadClassifier']))
    assert devices == ['zeta:0']
    assert 'cannot be spread: 1 blocks for 4 devices' in log


@pytest.mark.parametrize(
    ('parallel', 'words'),
    [
        (dict(enable=True, devices=5), 'need 5'),
        (dict(enable=True, devices=1), 'two or more devices'),
        (dict(enable=True, strategy='even'), "'even'"),
        (dict(enable=True, max_memory={'zeta:0': 1, 'zeta:1': 1}, devices=2), 'zeta:0'),
        (dict(enable=True, balance_threshold=2, strategy='dynamic'), 'balance_threshold'),
        (dict(enable=True, size=2), 'size'),
        (
            dict(enable=True, devices=2, no_split=['blocks'], force_balance=True),
            'force_balance=True refuses a plan that is uneven: imbalance',
        ),
    ],
)
@in_ranks()
def test_what_cannot_be_is_refused_before_the_model_is_built(tmp_path, parallel, words):
    with pytest.raises(PlacementError) as raised:
        build('classifier', 'zeta', tmp_path, model_parallel=parallel)
    assert words in str(raised.value)
    assert 'build_model' not in [entry.name for entry in raised.traceback]


@in_ranks(3, together=True)
def test_all_ranks_refuse_together(tmp_path):
    parallel = dict(enable=True, devices=2)
    expected = re.escape('3 process(es) on this host with 2 device(s) each need 6')
    with pytest.raises(PlacementError, match=expected):
        build('classifier', 'zeta', tmp_path, model_parallel=parallel)


DIGITS = str(ROOT / 'configs' / 'digits' / 'digits_cpu.py')


@pytest.mark.parametrize(('word', 'value'), [('true', True), ('false', False), ('auto', None)])
def test_the_flag(word, value):
    args = build_parser().parse_args([DIGITS, '--model-parallel', word])
    assert load_config(args).model_parallel == dict(enable=value)
    args.cfg_options = {'model_parallel.devices': 2}
    assert load_config(args).model_parallel == dict(enable=value, devices=2)
