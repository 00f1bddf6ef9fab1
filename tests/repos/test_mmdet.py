"""mmdet's own configs, inherited with a base config of ours, on every kind of device.

What they are compared with is mmdet on MMEngine's own runner, in one process on the CPU, with the
whole batch. Two ranks get pictures with equally many boxes, see :func:`tests.repos.coco.boxes_of`.
"""

import pytest

from tests.columns import NATIVE, device_of
from tests.jobs import largest_difference, load_file
from tests.ranks import run_ranks
from tests.repos.coco import faster_rcnn, make_coco, retinanet
from tests.repos.training import (
    ITERATIONS,
    WITHOUT_WORKERS,
    mean_losses,
    run_tools_train,
    write_config,
)

MODELS = dict(retinanet=retinanet, faster_rcnn=faster_rcnn)

#: Accelerator, number of ranks (0 is one process without a launcher) and model: each is trained on
#: an eager and on a lazy device. Faster R-CNN calls more of mmcv's operators, which zeta has none
#: of; mmdet's own script trains RetinaNet on the CPU. On lazy devices the numbers of boxes and of
#: proposals are shapes: each new one is compiled for.
CASES = [
    pytest.param(('cpu', 2, 'retinanet'), marks=pytest.mark.long),
    ('zeta', 2, 'faster_rcnn'),
    pytest.param((NATIVE, 2, 'retinanet'), marks=pytest.mark.long),
    pytest.param(('cuda', 1, 'retinanet'), marks=pytest.mark.cuda),
    pytest.param(('cuda', 2, 'faster_rcnn'), marks=pytest.mark.cuda),
    *(
        pytest.param(case, marks=[pytest.mark.xla, pytest.mark.long])
        for case in (('xla', 0, 'retinanet'), ('xla', 2, 'faster_rcnn'), ('gcu', 2, 'retinanet'))
    ),
]

every_case = pytest.mark.parametrize('case', CASES, ids=lambda case: '-'.join(map(str, case)))
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope='module')
def recipes(mmcv_operators, tmp_path_factory):
    root = make_coco(tmp_path_factory.mktemp('coco'))
    return {name: recipe(root) for name, recipe in MODELS.items()}


@every_case
def test_losses_are_those_of_one_process(stock, trained, case):
    name = case[-1]
    for loss in stock[name]['losses'][0]:
        if loss.startswith('loss'):
            expected = mean_losses([stock], name, loss=loss)
            assert len(expected) == ITERATIONS
            found = mean_losses(trained(case), name, loss=loss)
            assert found == pytest.approx(expected, abs=1e-3)


@every_case
def test_weights_are_those_of_one_process(stock, trained, case):
    expected = stock[case[-1]]['weights']
    for found in trained(case):
        assert largest_difference(found[case[-1]]['weights'], expected) <= 2e-3


@every_case
def test_metrics_are_those_of_one_process(stock, trained, case):
    expected = stock[case[-1]]['metrics']
    assert expected['coco/bbox_mAP_50'] >= 0.05  # some boxes are found
    for found in trained(case):
        for key, value in expected.items():
            assert found[case[-1]]['metrics'][key] == pytest.approx(value, abs=0.02)


@every_case
def test_the_last_checkpoint_gives_the_metrics_of_the_validation(trained, case):
    for found in trained(case):
        assert found[case[-1]]['files'] == ['epoch_1.pth', 'epoch_2.pth']
        assert found[case[-1]]['tested'] == found[case[-1]]['metrics']


@every_case
def test_resuming_goes_on(trained, case):
    whole = mean_losses(trained(case), case[-1])
    resumed = mean_losses(trained(case), case[-1], 'resumed')
    assert len(resumed) == ITERATIONS // 2
    assert resumed == pytest.approx(whole[-len(resumed) :], abs=1e-4)


@every_case
def test_each_rank_is_on_its_device(trained, case):
    accelerator, ranks, name = case
    for rank, found in enumerate(trained(case)):
        assert found[name]['device'] == device_of(accelerator, rank, ranks)
        if ranks:
            assert found[name]['wrapper'] == 'DeviceDistributedDataParallel'


def test_tools_train_of_mmdet_itself(recipes, stock, tmp_path):
    config = write_config(tmp_path / 'config.py', recipes['retinanet'], 'cpu')
    run_ranks(run_tools_train, 2, 'mmdet', config, tmp_path / 'work', *WITHOUT_WORKERS)
    saved = load_file(tmp_path / 'work' / 'epoch_2.pth')['state_dict']
    assert largest_difference(saved, stock['retinanet']['weights']) <= 2e-3
