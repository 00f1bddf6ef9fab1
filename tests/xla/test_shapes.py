"""Batches of many shapes on a lazy device: what is compiled, what is said, what padding does."""

import re

import pytest

from tests.jobs import need_mmcv_operations
from tests.ranks import run_ranks
from tests.xla.shape_jobs import SIZES, segmentor, train
from tests.xla.test_gcu_t20 import with_standin

pytestmark = pytest.mark.xla

BUCKETS = [(16, 16), (24, 32)]


def compiled_after(result, warmup=6):
    return result['counts'][-1] - result['counts'][warmup - 1]


def trainings(work_dir):
    """All that one process can do one after the other."""
    words = dict(sizes=[(12, 12)], lengths=list(range(1, 40)))
    same = dict(sizes=[(12, 12)])
    counting = dict(
        type='OneConvolution', counts=True, data_preprocessor=dict(type='ImgDataPreprocessor')
    )
    return dict(
        plain=train(work_dir),
        buckets=train(work_dir, pad_to=BUCKETS),
        multiple=train(work_dir, pad_to=8, dataset=dict(sizes=[(8 * n, 8) for n in range(1, 60)])),
        words=train(work_dir, dataset=words),
        numbers=train(work_dir, model=counting, dataset=same),
        smaller=train(work_dir, count=23, dataset=same, compilations=dict(warmup=4, patience=1)),
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


def test_the_warning_names_the_tensors_and_buckets_that_hold_them(results):
    (told,) = results['plain']['warnings']
    number = int(re.search(r'In iteration (\d+) these changed', told)[1])
    assert number == 7  # the third after four of warm-up
    before, after = (
        tuple(max(SIZES[2 * i + j][side] for j in (0, 1)) for side in (0, 1)) for i in (5, 6)
    )
    assert f'inputs: (2, 3, {before[0]}, {before[1]}) → (2, 3, {after[0]}, {after[1]})' in told
    assert f'in 3 of 3 iterations, {results["plain"]["counts"][6]} graphs so far' in told
    assert 'accelerator=dict(pad_to=[(32, 32)], ...)' in told
    assert 'of the 7 sizes seen so far' in told


def test_the_warning_says_that_a_multiple_leaves_many_shapes(results):
    (told,) = results['multiple']['warnings']
    assert re.search(r'Write pad_to=\[.*\] in place of the present one', told)


def test_what_pad_to_cannot_change_is_said(results):
    (told,) = results['words']['warnings']
    assert re.search(r'these changed: words\[\*\]: \(13,\), \(14,\)|words\[\*\]: \(11,\)', told)
    assert 'come with the samples' in told
    assert 'pad_to=[' not in told


def test_graphs_that_change_without_a_shape(results):
    (told,) = results['numbers']['warnings']
    assert 'No tensor of these batches had a new shape' in told
    assert 'Python numbers' in told


def test_the_last_smaller_batch_is_told_of(results):
    (told,) = results['smaller']['warnings']
    assert 'train_dataloader.drop_last=True' in told
    assert 'inputs: (2, 3, 12, 12) → (1, 3, 12, 12)' in told


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


def train_segmentors(work_dir):
    import torch
    from mmseg.utils import register_all_modules

    register_all_modules(init_default_scope=False)
    maps = dict(maps=True)
    padded = train(
        work_dir, model=segmentor(), scope='mmseg', dataset=maps, pad_to=(20, 24), count=20
    )
    torch.manual_seed(0)
    return padded


def test_mmseg_compiles_nothing_after_warm_up_though_ignored_pixels_vary(tmp_path):
    need_mmcv_operations()
    (padded,) = run_ranks(train_segmentors, 0, tmp_path, environ=dict(CPU_NUM_DEVICES='1'))
    assert compiled_after(padded) == 0
    assert padded['warnings'] == []


def compare_with_host(pad_to):
    """Losses of a segmentor on a lazy device, with padding, and on the host, without."""
    import torch
    from mmengine.registry import MODELS  # noqa: F401

    from mmdevplug.model.move import move_module
    from tests.data.test_padding import segmentation_batch, segmentor as edges

    found = []
    for device, padding in (('cpu', None), ('xla:0', pad_to)):
        model = move_module(edges(padding, size=(20, 30)), torch.device(device))
        data = model.data_preprocessor(segmentation_batch((20, 30), (20, 30)), True)
        losses = model.parse_losses(model(**data, mode='loss'))[1]
        found.append({name: float(value) for name, value in losses.items()})
    return found


def test_losses_with_padding_are_those_of_the_host_without(tmp_path):
    need_mmcv_operations()
    ((plain, padded),) = run_ranks(
        compare_with_host, 0, (32, 48), environ=dict(CPU_NUM_DEVICES='1')
    )
    assert plain['loss'] > 0.1
    for name, value in plain.items():
        assert padded[name] == pytest.approx(value, rel=1e-5)


def train_on_t20(work_dir):
    import torch_gcu

    told = train(work_dir, kind='gcu')
    torch_gcu.metrics_report = lambda: 'a report of another release'
    return told, train(work_dir, kind='gcu'), train(work_dir, kind='gcu', pad_to=(24, 32))


def test_shapes_are_counted_where_a_t20_tells_no_number(tmp_path):
    ((found, _),) = run_ranks(
        with_standin, 0, train_on_t20, tmp_path, environ=dict(TOPS_VISIBLE_DEVICES='0')
    )
    reported, plain, padded = found
    (told,) = reported['warnings']
    assert 'in 3 of 3 iterations' in told
    (told,) = plain['warnings']
    assert '7 different ones in 7 iterations' in told
    assert 'reports no number of compilations' in told
    assert padded['warnings'] == []


def train_rank(work_dir):
    """Each rank has other sizes, and so other buckets at times."""
    import os

    rank = int(os.environ['RANK'])
    sizes = SIZES if rank == 0 else [(10, 12)]
    return train(work_dir, pad_to=BUCKETS, dataset=dict(sizes=sizes), count=48)


def test_ranks_may_take_different_buckets(tmp_path):
    found = run_ranks(train_rank, 2, tmp_path, environ=dict(CPU_NUM_DEVICES='2'))
    for result in found:
        assert compiled_after(result, 8) == 0
        assert result['warnings'] == []
    assert len(found[0]['losses']) == 12
