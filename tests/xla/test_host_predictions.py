"""Validation over images of many sizes: few graphs, and the host's metrics."""

import pytest

from tests.ranks import run_ranks
from tests.xla.shape_jobs import SIZES, detect, segmentor, validate

pytestmark = pytest.mark.xla

PADDED = (20, 24)


def on_both(job, *args, **kwargs):
    return dict(cpu=job('cpu', *args, **kwargs), xla=job('xla', *args, **kwargs))


def validate_segmentors(work_dir):
    """Predictions of each image, on both devices: images of many sizes, and of one."""
    from mmseg.utils import register_all_modules

    register_all_modules(init_default_scope=False)
    return dict(
        many=on_both(validate, work_dir, segmentor(), SIZES[:24], pad_to=PADDED),
        one=on_both(validate, work_dir, segmentor(), [(12, 12)] * 6),
        views=on_both(validate, work_dir, segmentor(), SIZES[:8], pad_to=PADDED, views=True),
    )


@pytest.fixture(scope='module')
def segmented(mmcv_operators, tmp_path_factory):
    folder = tmp_path_factory.mktemp('validation')
    (found,) = run_ranks(validate_segmentors, 0, folder, environ=dict(CPU_NUM_DEVICES='1'))
    return found


@pytest.mark.parametrize('images', ['many', 'one', 'views'])
def test_predictions_of_a_segmentor_are_those_of_the_host(segmented, images):
    found = segmented[images]
    shapes = [tuple(each.shape) for each in found['xla']['predictions']]
    assert shapes == [tuple(each.shape) for each in found['cpu']['predictions']]
    assert len(set(shapes)) == (1 if images == 'one' else len(shapes))
    for here, there in zip(found['xla']['predictions'], found['cpu']['predictions']):
        assert (here == there).all()
    assert found['xla']['metrics'] == found['cpu']['metrics']


@pytest.mark.parametrize('images', ['many', 'one', 'views'])
def test_only_the_first_image_compiles(segmented, images):
    """Images differ in size, and in how many pixels the metric ignores."""
    counts = segmented[images]['xla']['counts']
    assert len(counts) > 5
    assert counts[1:] == counts[:1] * (len(counts) - 1)
    assert segmented[images]['xla']['devices'] == {'cpu'}


DETECTORS = ['RetinaHead', 'FCOSHead', 'GFLHead', 'YOLOXHead']


def detect_all():
    return {name: on_both(detect, name, SIZES[:6], (32, 32)) for name in DETECTORS}


@pytest.fixture(scope='module')
def detected(mmcv_operators):
    (found,) = run_ranks(detect_all, 0, environ=dict(CPU_NUM_DEVICES='1'))
    return found


@pytest.mark.parametrize('head', DETECTORS)
def test_boxes_of_a_detector_of_one_stage(detected, head):
    found = detected[head]
    assert any(len(boxes) for boxes, _ in found['cpu']['predictions'])
    for (boxes, labels), (expected, names) in zip(
        found['xla']['predictions'], found['cpu']['predictions']
    ):
        assert labels.tolist() == names.tolist()
        assert boxes == pytest.approx(expected, abs=1e-3)
    counts = found['xla']['counts']
    assert counts[1:] == [counts[0]] * 5
    executions = found['xla']['executions']
    assert {after - before for before, after in zip(executions[1:], executions[2:])} == {1}
