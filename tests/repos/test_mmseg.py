"""mmseg's own configs, inherited with a base config of ours, on every kind of device.

What they are compared with is mmseg on MMEngine's own runner, in one process on the CPU, with the
whole batch.
"""

import pytest
from mmengine.runner import Runner

from tests.columns import NATIVE, device_of
from tests.jobs import largest_difference, load_file
from tests.ranks import in_ranks, run_ranks
from tests.repos.segmentation import deeplabv3plus, make_cityscapes, segformer
from tests.repos.training import (
    ITERATIONS,
    WITHOUT_WORKERS,
    mean_losses,
    run_tools,
    run_tools_train,
    write_config,
)

#: Accelerator, number of ranks (0 is one process without a launcher) and model. SegFormer is
#: tested on sliding windows, DeepLabV3+ has two heads: each is trained on an eager and on a lazy
#: device. mmseg's own script trains SegFormer on the CPU.
CASES = [
    pytest.param(('cpu', 2, 'deeplabv3plus'), marks=pytest.mark.long),
    ('zeta', 2, 'segformer'),
    pytest.param((NATIVE, 2, 'deeplabv3plus'), marks=pytest.mark.long),
    pytest.param(('cuda', 1, 'segformer'), marks=pytest.mark.cuda),
    pytest.param(('cuda', 2, 'deeplabv3plus'), marks=pytest.mark.cuda),
    *(
        pytest.param(case, marks=[pytest.mark.xla, pytest.mark.long])
        for case in (('xla', 0, 'segformer'), ('xla', 2, 'deeplabv3plus'), ('gcu', 2, 'segformer'))
    ),
]

every_case = pytest.mark.parametrize('case', CASES, ids=lambda case: '-'.join(map(str, case)))
# Compiling for a lazy device takes most of it.
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope='module')
def recipes(mmcv_operators, tmp_path_factory):
    root = make_cityscapes(tmp_path_factory.mktemp('data') / 'cityscapes')
    return dict(segformer=segformer(root), deeplabv3plus=deeplabv3plus(root))


@every_case
def test_losses_are_those_of_one_process(stock, trained, case):
    name = case[-1]
    expected = mean_losses([stock], name)
    assert len(expected) == ITERATIONS
    assert expected[-1] < expected[0] - 0.3  # there is something to learn
    assert mean_losses(trained(case), name) == pytest.approx(expected, abs=1e-3)


@every_case
def test_weights_and_statistics_are_those_of_one_process(stock, trained, case):
    expected = stock[case[-1]]['weights']
    assert any('running_var' in key for key in expected)
    for found in trained(case):
        assert largest_difference(found[case[-1]]['weights'], expected) <= 5e-3


@every_case
def test_metrics_are_those_of_one_process(stock, trained, case):
    expected = stock[case[-1]]['metrics']
    assert set(expected) == {'aAcc', 'mIoU', 'mAcc'}
    # Ranks have the metrics from rank 0.
    for found in trained(case):
        for key, value in expected.items():
            assert float(found[case[-1]]['metrics'][key]) == pytest.approx(value, abs=0.5)


def test_models_learned_to_tell_classes_apart(stock):
    # One class alone would make 12.5 at most.
    assert stock['segformer']['metrics']['mIoU'] >= 40


@every_case
def test_the_last_checkpoint_gives_the_metrics_of_the_validation(trained, case):
    for found in trained(case):
        assert found[case[-1]]['files'] == ['iter_5.pth', 'iter_10.pth']
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


@pytest.fixture(scope='module')
def by_script(recipes, tmp_path_factory):
    """The config and the work directory of a training by mmseg's script."""
    folder = tmp_path_factory.mktemp('script')
    config = write_config(folder / 'config.py', recipes['segformer'], 'cpu')
    run_ranks(run_tools_train, 2, 'mmseg', config, folder / 'work', *WITHOUT_WORKERS)
    return config, folder / 'work'


def test_tools_train_of_mmseg_itself(by_script, stock):
    saved = load_file(by_script[1] / 'iter_10.pth')['state_dict']
    assert largest_difference(saved, stock['segformer']['weights']) <= 5e-3


@pytest.mark.parametrize('read', ['written', 'dumped'])
@in_ranks()
def test_tools_test_of_mmseg_itself(by_script, stock, tmp_path, read):
    """Run the script that calls ``Runner.from_cfg``; which runners were built, and the metrics."""
    config, trained = by_script
    if read == 'dumped':
        config = trained / 'config.py'
    built, test = [], Runner.test
    Runner.test = lambda runner: built.append((type(runner).__name__, test(runner)))
    try:
        words = (config, trained / 'iter_10.pth', '--work-dir', tmp_path)
        run_tools('mmseg', 'test.py', *words)
    finally:
        Runner.test = test
    assert [name for name, _ in built] == ['DeviceRunner']
    assert built[0][1] == pytest.approx(stock['segformer']['metrics'], abs=1)
