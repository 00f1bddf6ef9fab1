"""The T20 stand-in on top of torch_xla's CPU client."""

import pytest

from mmdevplug.checks import accelerators
from tests.jobs import ROOT

from .running import environment, the

pytestmark = pytest.mark.xla


def test_t20_stand_in(monkeypatch):
    standin = ROOT / 'standins' / 't20'
    for name, value in environment(standin, TOPS_VISIBLE_DEVICES='0,1').items():
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(str(standin))
    findings = accelerators.examine(dict(accelerator='gcu', config=None))
    assert 'T20 (stand-in)' in the(findings, 'ok', 'gcu: 2 device(s)').found
    assert the(findings, 'ok', 'xla:1 computes')
