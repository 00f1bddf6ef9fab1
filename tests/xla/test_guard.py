"""DeviceGuard on lazy devices, where mixing two of them aborts the process."""

import pytest
import torch

from mmdevplug.device_guard import DeviceGuard
from mmdevplug.errors import DeviceMismatchError
from tests.columns import job_of
from tests.device_guard.test_guard_legal import guarded_digits
from tests.ranks import in_ranks, run_ranks

pytestmark = pytest.mark.xla

ONE, TWO = 'xla:0', 'xla:1'


@in_ranks(**job_of('xla', 0))
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
