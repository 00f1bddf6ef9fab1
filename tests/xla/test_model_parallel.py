"""Models over several lazy devices of one process, against the same training on one."""

import pytest

from tests.jobs import largest_difference
from tests.parallel_jobs import STEPS, train
from tests.ranks import in_ranks, run_ranks
from tests.xla.executions import Counts, cost_of
from tests.xla.t20 import T20

pytestmark = pytest.mark.xla

FOUR_DEVICES = dict(CPU_NUM_DEVICES='4')
TOLERANCE = 1e-5
CLIP = dict(max_norm=0.5)


def train_on(kind, work_dir, counts, options):
    return [train(kind, 'xla', f'{work_dir}/{count}', count, **options) for count in counts]


def assert_close(found, expected):
    """Running variances of the segmentor are above 10, where float32 itself has steps of 1e-6."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        apart = abs(found[name] - value).max()
        assert apart <= TOLERANCE * max(1.0, abs(value).max()), name


def compare(kind, work_dir, counts, **options):
    ((one, *others),) = run_ranks(
        train_on, 0, kind, str(work_dir), (1, *counts), options, environ=FOUR_DEVICES, timeout=280
    )
    assert one['devices'] == ['xla:0']
    for count, found in zip(counts, others):
        assert found['devices'] == [f'xla:{i}' for i in range(count)]
        assert found['strategy'] == 'model_parallel'
        assert found['iter'] == STEPS
        assert_close(found['weights'], one['weights'])


@pytest.mark.parametrize(
    ('kind', 'counts'),
    [
        ('classifier', (2, 3, 4)),
        ('llama', (4,)),
        pytest.param('segmentor', (2,), marks=pytest.mark.operators),
    ],
)
def test_weights_are_those_of_one_device(tmp_path, kind, counts):
    compare(kind, tmp_path, counts)


@in_ranks(environ=FOUR_DEVICES)
def test_clipping_accumulation_and_ema_and_what_they_cost(tmp_path):
    """Clipping, accumulation and EMA on one device and on two, and what each iteration cost."""
    work_dir = str(tmp_path)
    hooks = []

    def prepare(runner):
        hooks.append(Counts())
        runner.register_hook(hooks[-1])

    options = dict(
        optim_wrapper__clip_grad=CLIP,
        optim_wrapper__accumulative_counts=2,
        train_cfg__max_iters=18,
        custom_hooks=[dict(type='EMAHook', momentum=0.1)],
    )
    one, two = (
        train('classifier', 'xla', f'{work_dir}/{count}', count, prepare=prepare, **options)
        for count in (1, 2)
    )
    one, two, counted = one['weights'], two['weights'], hooks[-1].counted
    assert largest_difference(one, two) <= TOLERANCE
    executions, compilations = cost_of(counted[-8:-1])  # the last one ends the run
    assert len(executions) == 6
    assert compilations == 0, str(counted)
    # A few for each cut, forward and back, and none for each of the parameters.
    assert max(executions) <= 10


@in_ranks(**T20)
def test_t20_standins(tmp_path):
    """On stand-ins of the vendor's cards, which are lazy devices of another package."""
    import t20_card

    one, two = (
        train('classifier', 'gcu', tmp_path / str(count), count, optim_wrapper__clip_grad=CLIP)
        for count in (1, 2)
    )
    assert two['devices'] == ['xla:0', 'xla:1']
    assert largest_difference(one['weights'], two['weights']) <= TOLERANCE
    assert t20_card.calls['sync_lived_tensor'] > 0


def test_two_ranks_of_two_devices_are_one_device_with_all_the_data(tmp_path):
    ((one,),) = run_ranks(train_on, 0, 'llama', str(tmp_path), (1,), {}, environ=FOUR_DEVICES)
    found = run_ranks(train, 2, 'llama', 'xla', tmp_path / 'two', 2, environ=FOUR_DEVICES)
    for rank, result in enumerate(found):
        assert result['strategy'] == 'data_and_model_parallel'
        assert result['devices'] == [f'xla:{2 * rank}', f'xla:{2 * rank + 1}']
        assert largest_difference(result['weights'], one['weights']) <= TOLERANCE
    assert largest_difference(found[0]['weights'], found[1]['weights']) == 0


@in_ranks(environ=FOUR_DEVICES)
def test_random_numbers_of_all_devices_are_seeded_and_restored():
    import torch

    from mmdevplug.accelerators import get_accelerator
    from mmdevplug.accelerators.random_states import random_state, set_random_state

    accelerator = get_accelerator('xla')
    devices = [torch.device('xla', index) for index in range(3)]
    accelerator.manual_seed(5)

    def draw():
        return [torch.rand(3, device=device).tolist() for device in devices]

    first = draw()
    state = random_state(accelerator, devices)
    second = draw()
    problem = set_random_state(state, accelerator, devices)
    again = draw()
    fewer = set_random_state(state, accelerator, devices[:2])
    assert first[0] == first[1] == first[2]
    assert second != first
    assert again == second
    assert problem is None
    assert 'saved of 3 device(s), and this rank has 2' in fewer
