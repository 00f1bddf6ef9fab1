"""Strategies, their figures, and what is refused."""

import json
import re
from fractions import Fraction

import pytest
import torch
from mmengine.logging import MMLogger
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from mmdevplug.errors import PlacementError
from mmdevplug.model_parallel import DevicePlan, make_plan as planning, plan
from mmdevplug.model_parallel.meta_build import can_build_on_meta
from tests.model_parallel.brute import best_score
from tests.model_parallel.models import Patched, every_model, make, without_memory


def layers(*widths):
    """A chain of linear layers that hold these numbers of values."""
    return nn.Sequential(*(nn.Linear(width, 1, bias=False) for width in widths))


def loads(made):
    return [made.loads[name] // 4 for name in made.devices]


# figures ------------------------------------------------------------------------------------


@pytest.mark.parametrize('memory', [None, {0: '3GB', 1: '1GB', 2: '2GB'}])
@pytest.mark.parametrize('name', every_model())
def test_never_above_accelerate(name, memory):
    model = make(name)
    for count in (2, 3, 4) if memory is None else (3,):
        devices = f'xla:0-{count - 1}'
        auto = plan(model, devices, 'auto', max_memory=memory, force_balance=False)
        ours = plan(model, devices, 'balanced', max_memory=memory)
        # Tensors that split modules hold go with a block; accelerate puts them anywhere.
        held = {name for name, _ in model.named_parameters()} & set(ours.device_map)
        slack = sum(4 * model.get_parameter(name).numel() for name in held)
        assert ours.bottleneck <= auto.bottleneck + slack * count / sum(ours.loads.values()) + 1e-9


@pytest.mark.parametrize('weights', [[1, 1, 1], [4, 1, 3]])
@pytest.mark.parametrize('name', ['gpt2', 't5', 'swin'])
def test_balanced_is_the_best_of_all_splits(name, weights):
    memory = None if weights == [1, 1, 1] else {i: w * 2**40 for i, w in enumerate(weights)}
    made = plan(make(name), 'xla:0-2', max_memory=memory)
    # Here the blocks hold all, and those that hold nothing are tied to the first of all.
    sizes = [block.bytes for block in made.blocks if block.bytes]
    assert sum(sizes) == sum(made.loads.values())
    best = best_score(sizes, weights, [float('inf')] * 3, [0] * len(sizes), False)
    found = [Fraction(made.loads[d], w) for d, w in zip(made.devices, weights)]
    ideal = Fraction(sum(sizes), sum(weights))
    assert max(found) == best[0]
    assert max(abs(ratio - ideal) for ratio in found) / ideal == best[2]


def test_figures_follow_from_the_loads():
    made = plan(layers(4, 2, 2, 3, 1), 'cuda:0-2')
    assert loads(made) == [4, 4, 4]
    assert made.imbalance == 0
    assert made.bottleneck == 1
    uneven = plan(layers(6, 3, 3), 'cuda:0-1', no_split=['1', '2'])
    assert loads(uneven) == [6, 6]
    lopsided = plan(layers(9, 1), 'cuda:0-1')
    assert lopsided.imbalance == pytest.approx(4 / 5)


def test_loads_follow_the_memory():
    made = plan(layers(*[1] * 12), 'cuda:0-2', max_memory={0: 600, 1: 200, 2: 400})
    assert loads(made) == [6, 2, 4]
    assert made.imbalance == 0
    assert made.capacities == {'cuda:0': 600, 'cuda:1': 200, 'cuda:2': 400}
    without_limit = plan(layers(*[1] * 12), 'cuda:0-1', max_memory={'cuda:0': 8})
    assert loads(without_limit) == [2, 10]


def test_devices_with_very_different_memory():
    model = nn.Sequential(*[nn.Linear(1000, 1000) for _ in range(4)])
    made = plan(model, 'cuda:0-1', 'balanced', max_memory='cuda:0=10MB,cuda:1=80GB')
    assert made.loads == {'cuda:0': 4_004_000, 'cuda:1': 3 * 4_004_000}


def test_training_counts():
    model = layers(8, 8, 8, 8)
    for parameter in model[:3].parameters():
        parameter.requires_grad_(False)
    # 8, 8, 8 and, with its gradient and two values of state, 32.
    assert loads(plan(model, 'cuda:0-1', training=True)) == [24, 32]
    assert sorted(loads(plan(model, 'cuda:0-1', training=True, optimizer='sgd'))) == [16, 24]
    assert loads(plan(model, 'cuda:0-1')) == [16, 16]


# strategies ---------------------------------------------------------------------------------


def test_dynamic_keeps_what_is_even_enough():
    model = layers(*[50] * 200)
    made, auto = plan(model, 'xla:0-1', 'dynamic'), plan(model, 'xla:0-1', 'auto')
    assert made.strategy == 'dynamic'
    assert made.device_map == auto.device_map
    assert made.steps[-1] == 'that is within the threshold 0.3: auto is used.'


@pytest.mark.skipif(not can_build_on_meta(), reason='the model would take 32 GB of memory')
@pytest.mark.parametrize(('threshold', 'largest'), [(0.3, 5.85), (0.1, 5.41)])
def test_dynamic_evens_llama_8b_where_the_threshold_asks_for_it(threshold, largest):
    sizes = dict(vocab_size=128256, hidden_size=4096, intermediate_size=14336)
    config = LlamaConfig(
        **sizes, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8
    )
    with without_memory():
        model = AutoModelForCausalLM.from_config(config)
    made = plan(model, 'cuda:0-2', 'dynamic', dtype='bfloat16', balance_threshold=threshold)
    assert max(made.loads.values()) / 1e9 == pytest.approx(largest, abs=0.005)


@pytest.mark.operators
def test_dynamic_balances_what_is_not():
    model = make('mmdet')
    auto, balanced = plan(model, 'xla:0-2', 'auto'), plan(model, 'xla:0-2')
    made = plan(model, 'xla:0-2', 'dynamic', balance_threshold=0.3)
    assert auto.imbalance > 0.3 > balanced.imbalance
    assert made.device_map == balanced.device_map
    words = ' '.join(made.steps)
    assert f'imbalance {auto.imbalance:.3f}' in words
    assert made.steps[-1] == 'auto is not even enough: balanced is used.'


def test_dynamic_balances_where_auto_fails():
    model = make('llama')
    needed = max(plan(model, 'xla:0-1').loads.values())
    limit = {0: needed, 1: needed}
    with pytest.raises(PlacementError, match='accelerate'):
        plan(model, 'xla:0-1', 'auto', max_memory=limit)
    made = plan(model, 'xla:0-1', 'dynamic', max_memory=limit)
    assert made.device_map == plan(model, 'xla:0-1', max_memory=limit).device_map
    assert made.steps[0].startswith('auto failed: HF accelerate finds no room')


def test_dynamic_falls_back_to_auto(monkeypatch):
    def fail(*args, **kwargs):
        raise PlacementError('no split')

    model = make('swin')
    auto = plan(model, 'xla:0-2', 'auto')
    monkeypatch.setattr(planning, 'fit', fail)
    made = plan(model, 'xla:0-2', 'dynamic', balance_threshold=0.1)
    assert made.device_map == auto.device_map
    assert made.steps[-2] == 'balanced failed, auto is used: no split'
    assert 'which fills device after device and counts weights alone' in made.warning


@pytest.mark.operators
def test_auto_cannot_keep_a_module_by_its_name():
    model = make('mmdet')
    assert plan(model, 'xla:0-2', no_split='backbone').device_of('backbone')
    with pytest.raises(
        PlacementError, match='HF accelerate splits backbone, which must stay whole'
    ):
        plan(model, 'xla:0-2', 'auto', no_split='backbone')


def test_one_device_holds_all():
    for strategy in ('auto', 'balanced', 'dynamic'):
        made = plan(make('gpt2'), 'xla:3', strategy)
        assert made.device_map == {'': 'xla:3'}
        assert made.imbalance == 0


# uneven plans -------------------------------------------------------------------------------


@pytest.mark.parametrize('strategy', ['balanced', 'dynamic'])
def test_a_device_that_gets_nearly_nothing_is_warned_of_or_refused(strategy):
    model = layers(2, 100_000, 2000)
    told = (
        r'cuda:0 would get nearly nothing and imbalance 1.941 is above balance_threshold=0.3: '
        r'cuda:0 8 bytes \(0.0% of its share\), cuda:1 390.62 KiB \(294.1% .*, cuda:2 7.81 KiB .*'
        r'1 of 390.62 KiB stays on one device, and an equal share is 132.82 KiB. '
        r'Take one device'
    )
    made = plan(model, 'cuda:0-2', strategy)
    assert loads(made) == [2, 100_000, 2000]
    assert re.search(told, made.warning)
    assert DevicePlan.from_dict(json.loads(json.dumps(made.to_dict()))).warning == made.warning
    with pytest.raises(PlacementError, match=f'force_balance=True refuses .*{told}'):
        plan(model, 'cuda:0-2', strategy, force_balance=True)


def test_a_warning_is_logged(monkeypatch):
    records = []
    monkeypatch.setattr(MMLogger.get_current_instance(), 'handle', records.append)
    plan(layers(5, 5), 'cuda:0-1')
    assert not records
    made = plan(layers(5, 100), 'cuda:0-1')
    assert [(r.levelname, r.getMessage()) for r in records] == [('WARNING', made.warning)]
    assert made.warning.startswith('The plan of Sequential is uneven: imbalance 0.905 is above')


def test_auto_is_the_map_of_accelerate_or_refused():
    model = layers(1000, 1000, 1000)
    for force in (False, None):
        theirs = plan(model, 'cuda:0-2', 'auto', force_balance=force)
        assert loads(theirs) == [1000, 2000, 0]
        assert 'cuda:2 would get nothing and imbalance 1.000' in theirs.warning
        assert "Take strategy='balanced' or 'dynamic', or fewer devices." in theirs.warning
    with pytest.raises(PlacementError, match='force_balance=True refuses a plan that is uneven'):
        plan(model, 'cuda:0-2', 'auto', force_balance=True)
    made = plan(model, 'cuda:0-2', 'dynamic')
    assert loads(made) == [1000, 1000, 1000]
    assert not made.warning


def test_an_uneven_plan_of_many_devices_names_the_extremes():
    made = plan(nn.Sequential(layers(*[50] * 19), layers(5000)), 'cuda:0-19')
    assert made.warning.count('of its share)') == 8
    assert 'cuda:19 19.53 KiB (1680.7% of its share), cuda:0 200 bytes' in made.warning
    assert 'Take one device for this model.' in made.warning


def test_one_device_or_the_host_alone_is_never_uneven():
    assert not plan(layers(5, 100), 'cuda:0').warning
    assert not plan(layers(5, 100), 'cpu').warning
    nothing = dict(max_memory={0: 0, 1: 0}, force_balance=False, exclude_cpu=False)
    assert not plan(layers(5, 5), 'cuda:0-1', **nothing).warning


# limits -------------------------------------------------------------------------------------


def test_a_device_that_is_too_small():
    model = layers(5, 5, 5, 5)
    memory = {0: 80, 1: 10, 2: 80}
    with pytest.raises(PlacementError, match='force_balance=False allows'):
        plan(model, 'cuda:0-2', max_memory=memory)
    made = plan(model, 'cuda:0-2', max_memory=memory, force_balance=False)
    assert loads(made) == [10, 0, 10]
    assert any('left out: cuda:1' in step for step in made.steps)
    assert made.imbalance == 1


def test_a_device_without_memory():
    with pytest.raises(PlacementError, match='gives cuda:1 no memory'):
        plan(layers(5, 5), 'cuda:0-1', max_memory={0: 80, 1: 0})
    made = plan(layers(5, 5), 'cuda:0-1', max_memory={0: 80, 1: 0}, force_balance=False)
    assert loads(made) == [10, 0]


def test_no_device_has_memory():
    nothing = dict(max_memory={0: 0, 1: 0}, force_balance=False)
    with pytest.raises(PlacementError, match='gives cuda:0, cuda:1 no memory'):
        plan(layers(5, 5), 'cuda:0-1', **nothing)
    made = plan(layers(5, 5), 'cuda:0-1', exclude_cpu=False, **nothing)
    assert loads(made) == [0, 0, 10]
    with pytest.raises(PlacementError, match='needs 20 bytes on one device.*cpu 10 bytes'):
        plan(layers(5), 'cpu', max_memory={'cpu': 10})
    small = dict(max_memory={0: 4, 1: 4}, exclude_cpu=False)
    with pytest.raises(PlacementError, match='0 needs 20 bytes on one device') as raised:
        plan(layers(5, 5, 5), 'cuda:0-1', **small)
    assert 'exclude_cpu' not in str(raised.value)
    assert loads(plan(layers(5, 5, 5), 'cuda:0-1', force_balance=False, **small)) == [0, 0, 15]


def test_more_devices_than_blocks():
    for strategy in ('dynamic', 'balanced'):
        with pytest.raises(
            PlacementError, match='2 blocks for 4 devices: cuda:2, cuda:3 would st'
        ):
            plan(layers(5, 5), 'cuda:0-3', strategy)
    assert sorted(loads(plan(layers(5, 5), 'cuda:0-3', force_balance=False))) == [0, 0, 5, 5]


def test_the_host_takes_the_rest_and_last():
    model = layers(*[5] * 10)
    memory = {0: 60, 1: 60, 'cpu': 120}
    made = plan(model, 'cuda:0-1', max_memory=memory, exclude_cpu=False)
    assert loads(made) == [15, 15, 20]
    assert made.device_map['9'] == 'cpu'
    assert made.imbalance == 0  # between the devices
    assert any('the host holds 80 bytes' in step for step in made.steps)
    roomy = plan(model, 'cuda:0-1', max_memory={0: 600, 1: 600}, exclude_cpu=False)
    assert loads(roomy) == [25, 25, 0]
    with pytest.raises(PlacementError, match='80 bytes are left for the host, which may hold 40'):
        plan(model, 'cuda:0-1', max_memory={**memory, 'cpu': 40}, exclude_cpu=False)


def test_auto_and_the_host():
    model = make('gpt2')
    memory = {0: '250KB', 1: '80KB', 'cpu': '1GB'}
    made = plan(model, 'cuda:0-1', 'auto', max_memory=memory, exclude_cpu=False)
    assert made.loads['cpu'] > 0
    assert made.loads['cuda:0'] <= 250_000
    assert made.loads['cuda:1'] <= 80_000
    with pytest.raises(PlacementError, match='finds no room'):
        plan(model, 'cuda:0-1', 'auto', max_memory={0: '250KB', 1: '80KB'})


@pytest.mark.parametrize('devices', ['cuda:0-1', 'cuda:0'])
def test_a_plan_that_leaves_everything_to_the_host_says_so(devices):
    model = make('gpt2')
    memory = {'cpu': '1GB', 0: '1KB', **({1: '1KB'} if '-' in devices else {})}
    options = dict(max_memory=memory, exclude_cpu=False)
    made = plan(model, devices, 'auto', **options)
    assert sum(made.loads.values()) == made.loads['cpu'] > 0
    warning = made.warning
    assert 'cuda:0' in warning
    assert 'would get nothing' in warning
    assert 'the host holds everything; the largest block is' in warning
    assert warning.endswith('Raise max_memory.')
    with pytest.raises(PlacementError, match='needs .* on one device|refuses a plan'):
        plan(model, devices, 'auto', force_balance=True, **options)


@pytest.mark.parametrize(
    ('options', 'words'),
    [
        (dict(strategy='best'), "strategy='best': expected one of 'auto', 'balanced', 'dynamic'"),
        (dict(balance_threshold=1.5), 'balance_threshold=1.5: expected 0 to 1'),
        (dict(balance_threshold=float('nan')), 'balance_threshold=nan'),
        (dict(balance_threshold=True), 'balance_threshold=True'),
        (dict(balance_threshold='0.3'), "balance_threshold='0.3'"),
        (dict(force_balance='no'), "force_balance='no': expected None, True or False"),
        (dict(optimizer=None, training=True), 'optimizer=None'),
        (
            dict(model=nn.Sequential(nn.LazyLinear(3))),
            '0.weight, 0.bias of Sequential has no shape',
        ),
        (dict(devices='cuda:0,cuda:0'), 'more than once'),
        (dict(devices=[]), 'names no device'),
        (dict(devices='cuda:0,xla:0'), 'different types'),
        (dict(max_memory={5: 1}), 'none of the devices'),
        (
            dict(model=layers(*[5] * 10), max_memory={0: 60, 1: 80}),
            'needs 200 bytes.*cuda:0 60 bytes, cuda:1 80 bytes: 60 bytes are missing'
            '.*2 devices of 100',
        ),
        (
            dict(model=layers(5, 40, 5), max_memory={0: 100, 1: 90}),
            '1 needs 160 bytes on one device, the largest device may hold 100 bytes',
        ),
        (dict(model=nn.Sequential(nn.ReLU())), 'Sequential has no parameters'),
    ],
)
def test_what_is_refused(options, words):
    given = dict(dict(model=layers(5, 5), devices='cuda:0-1'), **options)
    with pytest.raises(PlacementError, match=words):
        plan(**given)


# the plan itself ----------------------------------------------------------------------------


def test_a_plan_for_another_model():
    made = plan(make('llama'), 'xla:0-1')
    made.check(make('llama'))
    with pytest.raises(PlacementError, match='now Patched.*cls_token .* is not in the plan'):
        made.check(Patched())
    small = plan(layers(5, 5), 'xla:0-1')
    with pytest.raises(
        PlacementError, match=r'0.weight has the shape \[1, 6\], planned was \[1, 5\]'
    ):
        small.check(layers(6, 5))
    with pytest.raises(PlacementError, match='1.weight is missing'):
        small.check(layers(5))


def test_a_plan_survives_json():
    made = plan(make('t5'), 'xla:0-2', 'dynamic', max_memory='0=1GB,1=2GB')
    again = DevicePlan.from_dict(json.loads(json.dumps(made.to_dict())))
    assert again == made
    again.check(make('t5'))
    assert made.to_dict()['imbalance'] == made.imbalance


@pytest.mark.parametrize('broken', [{}, {'schema': 99}, {'schema': 2}, [], None])
def test_what_is_no_plan(broken):
    with pytest.raises(PlacementError, match='no plan|schema=99'):
        DevicePlan.from_dict(broken)


def test_where_something_is():
    made = plan(make('llama'), 'xla:0-2')
    assert made.device_of('model.embed_tokens') == torch.device('xla', 0)
    assert made.device_of('lm_head.weight') == torch.device('xla', 2)
    with pytest.raises(PlacementError, match="'model' is split over xla:0, xla:1, xla:2"):
        made.device_of('model')
    with pytest.raises(PlacementError, match="'nothing' is not in the model"):
        made.device_of('nothing')
