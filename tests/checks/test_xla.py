"""Lazy devices: torch_xla on PJRT's CPU client, and the T20 stand-in on top of it."""

import pytest

from mmdevplug.checks import accelerators
from mmdevplug.checks.collectives_rank import SIZED, run_rank
from tests.jobs import ROOT
from tests.ranks import run_ranks

from .running import environment, examined, the

pytestmark = pytest.mark.xla


def look():
    return run_rank('pytorch', 'xla', largest=1 << 10, rounds=1, timeout=100)


def test_collectives_between_lazy_devices():
    for results in run_ranks(look, 2, environ=dict(CPU_NUM_DEVICES='2')):
        assert results['passed'], results['checks']
        assert results['devices'] == ['xla:0', 'xla:1']
        assert results['tensors_on'] == 'xla'
        passed = {check['name'] for check in results['checks'] if check['status'] == 'pass'}
        assert passed == {*SIZED, 'barrier'}


def test_the_command(tmp_path):
    done, report = examined(
        tmp_path,
        *('--nproc', 2, '--accelerator', 'xla', '--largest-mb', 0.001, '--rounds', 1),
        CPU_NUM_DEVICES='2',
    )
    assert done.returncode == 0, done.stdout
    found = ' '.join(finding['found'] for finding in report['findings'])
    for words in ('2 ranks on xla:0, xla:1', 'xla: 2 device(s)', 'xla:1 computes'):
        assert words in found


def test_t20_stand_in(monkeypatch):
    standin = ROOT / 'tests' / 'standins' / 't20'
    for name, value in environment(standin, TOPS_VISIBLE_DEVICES='0,1').items():
        monkeypatch.setenv(name, value)
    findings = accelerators.examine(dict(accelerator='gcu', config=None))
    assert 'T20 (stand-in)' in the(findings, 'ok', 'gcu: 2 device(s)').found
    assert the(findings, 'ok', 'xla:1 computes')
