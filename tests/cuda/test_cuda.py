"""One GPU, or several, or the stand-in of a device with a backend of its own.

With ``-m cuda`` two ranks share a GPU over gloo, or have one each over nccl; a single rank uses
nccl. The rest of that column is where its other kinds of devices are: ``make test-cuda`` runs
features, parity, synchronized batch normalization, mixed precision, resuming, kills, samples,
sampling, model parallel and real models on a GPU, too.
"""

import pytest

import mmdevplug
from tests.columns import CUDA, NATIVE, device_of, gpus, job_of, within
from tests.conformance.card import Asked
from tests.conformance.test_collectives import compare
from tests.cuda.jobs import carry_objects, first_weights, infer, page_locked
from tests.features.rows import ROWS, train_rows
from tests.jobs import largest_difference, train_digits, train_plain
from tests.native import needs_native
from tests.ranks import run_ranks

each = pytest.mark.parametrize('accelerator', [pytest.param(NATIVE, marks=needs_native), CUDA])


@pytest.mark.cuda
@pytest.mark.parametrize('ranks', [0, 1, 2])
def test_accuracy(tmp_path, ranks):
    results = run_ranks(train_digits, ranks, 'cuda', tmp_path, **job_of('cuda', ranks))
    for rank, result in enumerate(results):
        assert result['accuracy'] >= 97.0
        assert result['device'] == device_of('cuda', rank, ranks)
        assert not result['staged']


@pytest.mark.cuda
@pytest.mark.parametrize('ranks', [1, 2])
def test_weights_equal_those_of_one_process_on_the_cpu(tmp_path, ranks):
    (expected,) = run_ranks(train_plain, 0, 'cpu', tmp_path / 'cpu')
    job = job_of('cuda', ranks)
    for result in run_ranks(train_plain, ranks, 'cuda', tmp_path / 'cuda', **job):
        assert largest_difference(result['weights'], expected['weights']) <= 1e-4


@pytest.mark.timeout(600)
@pytest.mark.parametrize('accelerator', [pytest.param(NATIVE, marks=pytest.mark.long), CUDA])
def test_features_in_a_single_rank_of_a_group(tmp_path, accelerator):
    names = [name for name, row in ROWS.items() if accelerator not in row.absent_on]
    (expected,) = run_ranks(train_rows, 0, names, 'cpu', tmp_path / 'cpu', True)
    (found,) = run_ranks(
        train_rows, 1, names, accelerator, tmp_path / 'one', timeout=500, **job_of(accelerator, 1)
    )
    for name in names:
        assert 'error' not in found[name], found[name]['error']
        difference = largest_difference(found[name]['weights'], expected[name]['weights'])
        assert difference <= within(accelerator, ROWS[name].tolerance), name


@each
def test_first_weights_are_drawn_where_the_config_says(tmp_path, accelerator):
    (found,) = run_ranks(
        first_weights, 0, accelerator, tmp_path, timeout=200, **job_of(accelerator, 1)
    )
    drawn_on = {name: place for name, (place, _) in found.items()}
    default = accelerator if accelerator == 'cuda' else 'cpu'
    assert drawn_on == dict(auto=default, host='cpu', device=accelerator, mmengine=accelerator)
    assert largest_difference(found['device'][1], found['mmengine'][1]) == 0.0
    like = 'device' if accelerator == 'cuda' else 'host'
    assert largest_difference(found['auto'][1], found[like][1]) == 0.0


@each
def test_gradients_pass_through_page_locked_memory(accelerator):
    expected = run_ranks(page_locked, 2, 'cpu')
    found = run_ranks(page_locked, 2, accelerator, **job_of(accelerator))
    for rank, (mine, wanted) in enumerate(zip(found, expected)):
        assert mine['device'] == device_of(accelerator, rank)
        assert mine['locked']
        assert largest_difference(mine['weights'], wanted['weights']) <= within(accelerator, 1e-6)


@each
def test_objects(accelerator):
    for rank, found in enumerate(run_ranks(carry_objects, 2, accelerator, **job_of(accelerator))):
        assert found['by_torch'] == [dict(of=0), dict(of=1)]
        assert found['gathered'] == [0, 1]
        assert found['sent'] == [dict(of=0)]
        assert found['cpu'] == found['gpu'] == ([0, 1] if rank == 0 else None)
        assert found['total'] == 2.0


@pytest.mark.parametrize(
    ('accelerator', 'ranks'),
    [(NATIVE, 2), *(pytest.param('cuda', ranks, marks=pytest.mark.cuda) for ranks in (1, 2))],
)
def test_every_collective(accelerator, ranks):
    shared = accelerator == 'cuda' and ranks > gpus()
    asked = Asked(accelerator, mmdevplug.base_config('cuda_gloo') if shared else None)
    assert asked.run(compare, ranks=ranks, **job_of(accelerator, ranks)) == [[]] * ranks


@each
def test_inferencers(accelerator):
    ((device, difference),) = run_ranks(infer, 0, accelerator, **job_of(accelerator, 1))
    assert device == f'{accelerator}:0'
    assert difference <= within(accelerator, 1e-6)
