"""Families of devices: absent, broken, hanging, wrong, and right."""

import pytest
import torch

from mmdevplug.accelerators import CPUAccelerator
from mmdevplug.checks import accelerators
from mmdevplug.errors import AcceleratorError

from .running import environment, the


@pytest.fixture
def children(monkeypatch, forked_checks):
    """Let children find packages of a folder and the stand-in card."""

    def use(*paths, **environ):
        for name, value in environment(*paths, **environ).items():
            monkeypatch.setenv(name, value)
        for path in paths:
            monkeypatch.syspath_prepend(str(path))

    return use


def config(folder, module, accelerator):
    path = folder / 'card.py'
    path.write_text(
        f'custom_imports = dict(imports=[{module!r}], allow_failed_imports=False)\n'
        f'accelerator = dict(type={accelerator!r})\n'
    )
    return str(path)


def examine(name=None, path=None, seconds=60):
    return accelerators.examine(dict(accelerator=name, config=path), seconds)


def test_every_device_of_a_card_is_tried(tmp_path, children):
    children(FAKECARD_NAME='zeta')
    path = config(tmp_path, 'fakecard_from_env', 'zeta')
    findings = examine('zeta', path)
    the(findings, 'ok', 'zeta: 4 device(s)', 'zeta:0', 'zeta:3')
    for index in range(4):
        assert the(findings, 'ok', f'zeta:{index} computes as the CPU does')
    (lacking,) = [finding for finding in findings if finding.level != 'ok']
    assert lacking.found == ('zeta: torch.zeta does not offer: Event (copies to the host wait).')


def test_all_families_are_looked_at_and_the_absent_ones_named(tmp_path, children):
    (tmp_path / 'torch_npu.py').write_text('raise ImportError("libascendcl.so: not found")')
    (tmp_path / 'torch_gcu.py').write_text('import os; os.abort()')
    children(tmp_path)
    findings = examine()
    assert 'libascendcl.so' in the(findings, 'error', 'torch_npu').found
    the(findings, 'error', 'gcu: looking for devices', 'SIGABRT')
    absent = the(findings, 'note', 'not there: ').found
    assert 'musa (needs the package torch_musa)' in absent
    assert 'npu' not in absent
    assert 'hpu (needs the package habana_frameworks.torch)' in absent
    assert the(findings, 'ok', 'cpu computes')


@pytest.mark.long
def test_package_that_hangs_is_given_up(tmp_path, children):
    (tmp_path / 'torch_musa.py').write_text('import time; time.sleep(1000)')
    children(tmp_path)
    found = the(examine('musa', seconds=45), 'error', 'musa: looking for devices')
    assert 'gave no answer for 45 s' in found.found


WRONG = """
from functools import cached_property
from mmdevplug.accelerators import Copies, CPUAccelerator
from mmdevplug.registry import ACCELERATORS

class RustyCopies(Copies):
    def to_host(self, tensors):
        return [tensor * {factor} for tensor in super().to_host(tensors)]

@ACCELERATORS.register_module(name='rusty')
class Rusty(CPUAccelerator):
    name = 'rusty'
    copies = cached_property(RustyCopies)
"""


@pytest.mark.parametrize('factor', [1.1, float('nan')])
def test_device_that_computes_something_else(tmp_path, children, factor):
    (tmp_path / 'rusty.py').write_text(WRONG.format(factor=f'float("{factor}")'))
    children(tmp_path)
    findings = examine('rusty', config(tmp_path, 'rusty', 'rusty'))
    assert the(findings, 'error', 'computes a matrix product that differs from the CPU')


def test_device_that_fails_the_last_check_leaves_the_others_to_be_tried(monkeypatch):
    class Pair(CPUAccelerator):
        def device_count(self):
            return 2

        def device(self, local_rank=0):
            return torch.device('cpu', local_rank)

    def probe(_, device):
        if device.index == 0:
            raise AcceleratorError('device cpu:0 failed its first operation')
        return []

    monkeypatch.setattr(accelerators, 'probe_device', probe)
    steps = []
    listed, broken, fine = accelerators._examine_devices(Pair(), 2, steps.append)
    assert [listed.level, broken.level, fine.level] == ['ok', 'error', 'ok']
    assert broken.found == 'device cpu:0 failed its first operation'
    assert fine.found == 'cpu:1 computes as the CPU does'
    assert steps[-1] == 'computing on cpu:1'


def test_card_that_was_asked_for_and_is_not_there(children):
    children(CUDA_VISIBLE_DEVICES='')
    findings = examine('cuda')
    found = the(findings, 'error', 'cuda: no device')
    assert findings == [found]
    assert "CUDA_VISIBLE_DEVICES=''" in found.found
    assert found.remedy == 'unset CUDA_VISIBLE_DEVICES'


def test_hidden_devices_are_a_warning(children):
    children(CUDA_VISIBLE_DEVICES='-1')
    findings = accelerators.examine(dict(accelerator=None, config=None))
    assert the(findings, 'warning', 'cuda').remedy == 'unset CUDA_VISIBLE_DEVICES'


def test_name_that_no_family_has(children):
    children()
    (found,) = examine('tpuu')
    assert "'tpuu', which is unknown" in found.found
