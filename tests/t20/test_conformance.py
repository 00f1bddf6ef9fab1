"""The suite passes on the stand-in, on the PyTorch that a T20 runs."""

import pytest

from mmdevplug.checks import accelerators
from tests.checks.conformance.running import in_groups, measured
from tests.checks.running import environment, the
from tests.t20.conftest import FOLDER, MISSING

pytestmark = [pytest.mark.t20, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]


def test_the_doctor_computes_on_every_card_after_the_cpu(torch_gcu, monkeypatch):
    """Autograd has threads for the cards that were known at the first backward of a process."""
    for name, value in environment(FOLDER).items():
        monkeypatch.setenv(name, value)
    findings = accelerators.examine(dict(accelerator=None, config=None))
    assert [each.found for each in findings if each.level == 'error'] == []
    for device in ('cpu', *(f'xla:{index}' for index in range(8))):
        the(findings, 'ok', f'{device} computes matmul, convolution, reduction, softmax backward')


@pytest.mark.timeout(600)
@in_groups
def test_stand_in(torch_gcu, tmp_path, checks):
    env = environment(FOLDER, TOPS_VISIBLE_DEVICES='0,1')
    found = measured(tmp_path, 'gcu', checks, env, {'device guard'})
    assert '2 device(s): T20 (stand-in)' in found['detection']
    expected = {
        # PyTorch 1.10 has samples of fewer operations, which the row says.
        'operations': '79 operations',
        'mixed precision': 'torch.float16',
        'training on 2 ranks': '2 ranks on xla:0, xla:1',
    }
    for check, words in expected.items():
        assert words in found.get(check, words)
