"""The suite passes on the stand-in, on the PyTorch that a T20 runs."""

import pytest

from tests.conformance.running import assert_passed, conformance
from tests.doctor.running import environment
from tests.t20.conftest import FOLDER, MISSING

pytestmark = [pytest.mark.t20, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]


@pytest.mark.timeout(600)
def test_stand_in(torch_gcu, tmp_path):
    env = environment(FOLDER, TOPS_VISIBLE_DEVICES='0,1')
    done, report = conformance(tmp_path, '--accelerator', 'gcu', env=env)
    assert_passed(done, report, {'device guard'})
    measured = {found['section']: found['found'] for found in report['findings']}
    assert 'torch.float16' in measured['mixed precision']
    assert '2 ranks on xla:0, xla:1' in measured['training on 2 ranks']
    # PyTorch 1.10 has samples of fewer operations, which the row says.
    assert '79 operations' in measured['operations']
    assert 'nn.functional.silu' in measured['operations']
