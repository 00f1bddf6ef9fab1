"""Batches of many shapes on a lazy device: what is compiled, what is said, what padding does."""

import os

import pytest

from tests.columns import job_of
from tests.ranks import in_ranks, run_ranks
from tests.xla.shape_jobs import SIZES, segmentor, train
from tests.xla.t20 import T20

pytestmark = pytest.mark.xla

BUCKETS = [(16, 16), (24, 32)]


def compiled_after(result, warmup=6):
    return result['counts'][-1] - result['counts'][warmup - 1]


def trainings(work_dir):
    """All that one process can do one after the other."""
    return dict(
        plain=train(work_dir),
        buckets=train(work_dir, pad_to=BUCKETS),
        multiple=train(work_dir, pad_to=8, dataset=dict(sizes=[(8 * n, 8) for n in range(1, 60)])),
        silent=train(work_dir, compilations=False),
    )


@pytest.fixture(scope='module')
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp('shapes')
    (found,) = run_ranks(trainings, 0, folder, environ=dict(CPU_NUM_DEVICES='1'))
    return found


def test_each_new_shape_is_compiled_without_padding(results):
    counts = results['plain']['counts']
    assert len(counts) == 12
    assert all(after > before for before, after in zip(counts, counts[1:]))
    assert results['plain']['logged'] == counts[-1]


def test_nothing_is_compiled_after_warm_up_with_padding(results):
    assert compiled_after(results['buckets']) == 0
    assert results['buckets']['warnings'] == []
    executions = results['buckets']['executions']
    assert {b - a for a, b in zip(executions[6:], executions[7:])} == {1}


def test_one_warning_says_that_compiling_does_not_end(results):
    (told,) = results['plain']['warnings']
    assert f'in 3 of 3 iterations, {results["plain"]["counts"][6]} graphs so far' in told
    assert 'accelerator=dict(pad_to=...)' in told
    assert len(results['multiple']['warnings']) == 1


def test_watching_compiles_and_runs_nothing(results):
    watched, silent = results['plain'], results['silent']
    # The graphs of the first run are there already.
    assert silent['counts'][-1] == silent['counts'][0]
    assert silent['warnings'] == []
    steps = [
        [b - a for a, b in zip(run['executions'], run['executions'][1:])]
        for run in (watched, silent)
    ]
    assert steps[0] == steps[1]


@pytest.mark.operators
@in_ranks(environ=dict(CPU_NUM_DEVICES='1'))
def test_mmseg_compiles_nothing_after_warm_up_though_ignored_pixels_vary(tmp_path):
    import torch
    from mmseg.utils import register_all_modules

    register_all_modules(init_default_scope=False)
    maps = dict(maps=True)
    padded = train(
        tmp_path, model=segmentor(), scope='mmseg', dataset=maps, pad_to=(20, 24), count=20
    )
    torch.manual_seed(0)
    assert compiled_after(padded) == 0
    assert padded['warnings'] == []


@pytest.mark.operators
@in_ranks(environ=dict(CPU_NUM_DEVICES='1'))
def test_losses_with_padding_are_those_of_the_host_without():
    """Losses of a segmentor on a lazy device, with padding, and on the host, without."""
    import torch
    from mmengine.registry import MODELS  # noqa: F401

    from mmdevplug.model.move import move_module
    from tests.data.test_padding import segmentation_batch, segmentor as edges

    found = []
    for device, padding in (('cpu', None), ('xla:0', (32, 48))):
        model = move_module(edges(padding, size=(20, 30)), torch.device(device))
        data = model.data_preprocessor(segmentation_batch((20, 30), (20, 30)), True)
        losses = model.parse_losses(model(**data, mode='loss'))[1]
        found.append({name: float(value) for name, value in losses.items()})
    plain, padded = found
    assert plain['loss'] > 0.1
    for name, value in plain.items():
        assert padded[name] == pytest.approx(value, rel=1e-5)


@in_ranks(**dict(T20, environ=dict(TOPS_VISIBLE_DEVICES='0')))
def test_a_t20_tells_its_compilations_or_nothing_is_said(tmp_path):
    import torch_gcu

    (told,) = train(tmp_path, kind='gcu')['warnings']
    torch_gcu.metrics_report = lambda: 'a report of another release'
    unknown = train(tmp_path, kind='gcu')
    assert 'in 3 of 3 iterations' in told
    assert unknown['warnings'] == []
    assert unknown['logged'] is None


@in_ranks(2, **job_of('xla'))
def test_ranks_may_take_different_buckets(tmp_path):
    """Each rank has other sizes, and so other buckets at times."""
    sizes = SIZES if os.environ['RANK'] == '0' else [(10, 12)]
    result = train(tmp_path, pad_to=BUCKETS, dataset=dict(sizes=sizes), count=48)
    assert compiled_after(result, 8) == 0
    assert result['warnings'] == []
    assert len(result['losses']) == 12
