"""A sharded training is that of one process, on any number of ranks and any eager device."""

from functools import partial

import pytest
import torch
from mmengine.runner import set_random_seed
from torch import distributed as torch_dist, nn

from mmdevplug import init_device
from mmdevplug.sharding.build import build_without_weights
from mmdevplug.sharding.shard import giving_whole
from mmdevplug.sharding.states import is_sharded
from tests.columns import NATIVE, job_of
from tests.jobs import need_peft
from tests.parallel_jobs import build
from tests.ranks import in_ranks, run_ranks

from .jobs import train_all

pytestmark = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split('.')[:2])) < (2, 7), reason='FSDP2 needs PyTorch 2.7'
)

EMA = [dict(type='EMAHook', momentum=0.1, update_buffers=True)]
ADAM = dict(_delete_=True, type='AdamW', lr=0.001, weight_decay=0.05)
NO_DECAY = dict(norm_decay_mult=0.0, bias_decay_mult=0.0, custom_keys=dict(head=dict(lr_mult=2.0)))
#: Kinds of models, how they are sharded, and other options of the training.
CASES = dict(
    twice=('twice', True, dict(optim_wrapper__clip_grad=dict(max_norm=0.5), custom_hooks=EMA)),
    llama=(
        'tied_llama',
        True,
        dict(optim_wrapper__accumulative_counts=2, optim_wrapper__optimizer=ADAM),
    ),
    own_ways=('own_ways', True, {}),
    lora=('lora', dict(reshard_after_forward=False), {}),
    # Its normalization takes biases away again: AdamW would make steps of rounding.
    segformer=(
        'segformer',
        True,
        dict(optim_wrapper__paramwise_cfg=NO_DECAY, optim_wrapper__optimizer__weight_decay=0.05),
    ),
    vit=('vit', dict(blocks=['backbone.layers.1', 'FFN']), {}),
    detr=('detr', True, dict(optim_wrapper__clip_grad=dict(max_norm=0.1))),
    bn=('classifier', True, dict(sync_bn='auto', custom_hooks=EMA[:1])),
)
#: Those without a repository of models to import.
FEW = ['twice', 'llama', 'bn', 'own_ways']


def compare(names, world_size, device, tmp_path, **sharding):
    if 'lora' in names:
        need_peft()
    cases = [CASES[name] for name in names]
    (alone,) = run_ranks(train_all, 0, cases, 'cpu', str(tmp_path), False)
    if sharding:
        cases = [(kind, sharding, options) for kind, _, options in cases]
    more = job_of(device, world_size)
    job = run_ranks(train_all, world_size, cases, device, str(tmp_path), True, **more)
    for of_rank in job:
        for name, found, expected in zip(names, of_rank, alone):
            assert found['active'], name
            part = found['all'] / sharding.get('ranks', world_size)
            assert found['held'] < part * 1.1 + 200, name
            assert len(found['losses']) == 10
            for key in ('losses', 'norms'):
                close = dict(rtol=1e-5, atol=1e-5, msg=f'{name}: {key}')
                torch.testing.assert_close(found[key], expected[key], **close)
            assert found['averaged'].keys() == expected['averaged'].keys()
            for of in ('weights', 'averaged'):
                for key, weight in expected[of].items():
                    where = f'{name}: {of} {key}'
                    # Where batch normalization is, kernels that processors choose differ by more.
                    atol = 1e-3 if name == 'bn' else 1e-5
                    torch.testing.assert_close(
                        found[of][key], weight, rtol=0, atol=atol, msg=where
                    )
    return job


@pytest.mark.parametrize(
    'names',
    [
        FEW,
        pytest.param(
            [n for n in CASES if n not in FEW], marks=[pytest.mark.long, pytest.mark.operators]
        ),
    ],
)
def test_two_ranks_train_as_one_process(names, tmp_path):
    compare(names, 2, 'cpu', tmp_path)


@pytest.mark.long
@pytest.mark.operators
@pytest.mark.parametrize('ranks', [1, 4])
def test_other_numbers_of_ranks_train_as_one_process(ranks, tmp_path):
    compare(list(CASES), ranks, 'cpu', tmp_path)


@pytest.mark.operators
def test_two_copies_of_two_ranks_each_train_as_one_process(tmp_path):
    compare(['twice', 'segformer'], 4, 'cpu', tmp_path, ranks=2)


needs_card = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split('.')[:2])) < (2, 13),
    reason='DTensor on a card needs PyTorch 2.13',
)


@needs_card
@pytest.mark.operators
@pytest.mark.parametrize('device', ['streams', NATIVE])
def test_cards_train_as_one_process(device, tmp_path):
    compare(['twice', 'own_ways', 'segformer', 'vit'], 2, device, tmp_path)


@needs_card
@pytest.mark.operators
@pytest.mark.parametrize(('device', 'ranks'), [('streams', 2), (NATIVE, 2), (NATIVE, 1)])
def test_weights_on_the_host_train_as_one_process(device, ranks, tmp_path):
    names = ['twice', 'own_ways', 'segformer', 'bn']
    for of_rank in compare(names, 2, device, tmp_path, ranks=ranks, offload=True):
        assert {tuple(each['devices']) for each in of_rank} == {('cpu',)}


def infer_then_train(work_dir):
    runner = build('twice', 'cpu', work_dir, sharding=True, default_scope='mmengine')
    drawn = torch.rand(1).item()
    with torch.inference_mode():
        runner.model(torch.ones(2, 3, 8, 8), torch.zeros(2, dtype=torch.long))
    whole = [name for name, each in runner.model.named_parameters() if not is_sharded(each)]
    runner.train()
    return runner.iter, whole, drawn


def test_a_model_that_has_inferred_is_trained(tmp_path):
    first, second = run_ranks(infer_then_train, 2, str(tmp_path))
    assert first == second  # ranks without weights have the random state of the first, too
    assert first[:2] == (10, [])


AMP = dict(optim_wrapper__type='AmpOptimWrapper', optim_wrapper__loss_scale='dynamic')


def test_mixed_precision_is_that_of_data_parallel_training(tmp_path):
    cases = [
        ('llama', True, dict(AMP, optim_wrapper__dtype=dtype)) for dtype in ('float16', 'bfloat16')
    ]
    sharded, parallel = (
        run_ranks(train_all, 2, cases, 'cpu', str(tmp_path), way)[0] for way in (True, False)
    )
    for found, expected in zip(sharded, parallel):
        assert (found['active'], expected['active']) == (True, False)
        torch.testing.assert_close(found['losses'], expected['losses'], rtol=0, atol=1e-3)
        for name, weight in expected['weights'].items():
            torch.testing.assert_close(found['weights'][name], weight, rtol=0, atol=1e-4)


def test_blocks_in_bfloat16_leave_weights_in_float32(tmp_path):
    cases = [('twice', sharding, {}) for sharding in (True, dict(mixed_precision='bf16'))]
    plain, half = run_ranks(train_all, 2, cases, 'cpu', str(tmp_path), True)[0]
    assert {str(each.dtype) for each in half['weights'].values()} == {'torch.float32'}
    torch.testing.assert_close(half['losses'], plain['losses'], rtol=0, atol=0.1)
    assert half['losses'] != plain['losses']


def draw_after_building(seeds):
    init_device('pytorch', 'cpu')
    set_random_seed(seeds[torch_dist.get_rank()])
    build_without_weights(partial(nn.Linear, 2 + 2 * torch_dist.get_rank(), 2))
    return torch.rand(1).item()


@pytest.mark.parametrize(('seeds', 'equal'), [((5, 5), True), ((5, 6), False)])
def test_ranks_of_one_seed_go_on_as_rank_0_and_others_by_themselves(seeds, equal):
    one, other = run_ranks(draw_after_building, 2, seeds)
    assert (one == other) is equal


@in_ranks(2)
def test_the_norm_that_clipping_returns_is_of_all_ranks():
    init_device('pytorch', 'cpu')
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial

    mesh = init_device_mesh('cpu', (2,))
    mine = torch.tensor(torch_dist.get_rank() + 1.0)
    clip = giving_whole(lambda: DTensor.from_local(mine, mesh, [Partial()]))
    assert float(clip()) == 3.0
    assert giving_whole(lambda: mine)() is mine
