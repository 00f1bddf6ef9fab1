"""DeviceGuard on lazy devices, where mixing two of them aborts the process."""

import pytest
import torch

from mmdevplug.device_guard import DeviceGuard
from mmdevplug.errors import DeviceMismatchError
from tests.device_guard.test_guard_legal import guarded_digits, legal
from tests.device_guard.test_guard_mismatches import (
    CASES,
    check_beside_host,
    check_moves,
    check_report,
    run_cases,
)
from tests.device_guard.test_guard_moving import model_parallel
from tests.ranks import in_ranks, run_ranks

pytestmark = pytest.mark.xla

DEVICES = dict(CPU_NUM_DEVICES='4')
ONE, TWO = 'xla:0', 'xla:1'

#: What does not abort: torch_xla replaces ``out``, and PyTorch looks at the weights first.
STOCK = {'out': 'silent', 'recurrent': 'raises'}


@pytest.fixture(scope='module')
def told():
    return run_ranks(run_cases, 0, 'xla', environ=DEVICES)[0]


@pytest.mark.parametrize('name', CASES)
def test_two_devices(told, name):
    assert told[name]['stock'] == STOCK.get(name, 'SIGABRT')
    check_report(name, told[name]['apart'], ONE, TWO)
    check_moves(told[name]['apart'])


@pytest.mark.parametrize('name', CASES)
def test_device_and_host(told, name):
    check_beside_host(name, told[name]['beside_host'], ONE)


def test_what_pytorch_takes_is_left_alone():
    ((refused, unknown),) = run_ranks(legal, 0, ONE, TWO, environ=DEVICES)
    # torch_xla brings its own clip_grad_norm_, which stacks the norms of all devices.
    assert list(refused) == ['clip']
    assert 'torch.stack' in refused['clip']
    assert unknown == ['pack']  # torch_xla cannot.


def test_train_step_of_a_model_on_two_devices():
    run_ranks(model_parallel, 0, ONE, TWO, environ=DEVICES)


@in_ranks(environ=DEVICES)
def test_a_warning_does_not_let_the_process_be_aborted():
    x, y = torch.ones(2, 2, device=ONE), torch.ones(2, 2, device=TWO)
    with DeviceGuard('warn') as guard:
        summed = x + torch.ones(2, 2)  # torch_xla sends the second one.
        with pytest.raises(DeviceMismatchError) as caught:
            torch.matmul(x, y)
    assert summed.sum().item() == 8
    assert "policy='warn' goes on elsewhere" in str(caught.value)
    assert '2 operation(s) at 2 place(s)' in guard.report()
    number = torch.tensor(2.0)  # torch_xla takes it as a factor, not as a branch.
    with DeviceGuard('move') as guard:
        branch = torch.where(x > 0, x * number, number)
    assert guard.moved.number == 1
    assert branch.sum().item() == 8


def test_training_under_a_guard(tmp_path):
    ((device, report),) = run_ranks(guarded_digits, 0, 'xla', tmp_path)
    assert device == ONE
    assert report == 'No operation had operands on different devices.'
