"""Versions that do not go together, and packages that cannot be imported."""

import pytest
import torch

from mmdevplug.checks import versions
from mmdevplug.checks.isolated import run_isolated

from .running import examined, package, the


@pytest.mark.parametrize(
    ('line', 'told'),
    [
        ('raise OSError("libc10_cuda.so: cannot open shared object file")', 'libc10_cuda.so'),
        ('import os; os.abort()', 'SIGABRT'),
        ('import sys; sys.exit(7)', 'exit status 7'),
    ],
)
def test_packages_behind_a_broken_one_are_still_tried(tmp_path, monkeypatch, line, told):
    package(tmp_path, 'torchvision', line)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = list(run_isolated(versions.__name__, ['json', 'torchvision', 'csv'], {}, 60))
    assert [each.level for each in found] == ['ok', 'error', 'ok']
    assert told in found[1].found
    assert 'import torchvision' in found[1].found


def test_broken_torch_is_a_finding_and_no_traceback(tmp_path):
    package(tmp_path, 'torch', 'raise OSError("libcudart.so.12: no such file")')
    done, report = examined(tmp_path, paths=[tmp_path])
    assert done.returncode == 1
    assert report['exit_status'] == 1
    (error,) = [f for f in report['findings'] if f['level'] == 'error' and 'torch' in f['found']]
    assert 'libcudart.so.12' in error['found']
    assert 'import torch' in error['remedy']
    assert {f['section'] for f in report['findings']} == {'versions'}


@pytest.mark.skipif(
    not hasattr(torch, '_import_device_backends'), reason='PyTorch 2.5 loads backends by itself'
)
def test_a_vendors_package_that_breaks_torch_is_the_only_error(tmp_path):
    symbol = 'torch_acme/_C.so: undefined symbol: _ZN3c105ErrorC2E'
    package(tmp_path, 'torch_acme', f'def load():\n    raise ImportError({symbol!r})\n')
    info = tmp_path / 'torch_acme-1.0.dist-info'
    info.mkdir()
    (info / 'METADATA').write_text(
        'Metadata-Version: 2.1\nName: torch-acme\nVersion: 1.0\nRequires-Dist: torch==2.1.*\n'
    )
    (info / 'entry_points.txt').write_text('[torch.backends]\nacme = torch_acme:load\n')
    done, report = examined(tmp_path, paths=[tmp_path])
    assert done.returncode == 1
    (error,) = [found for found in report['findings'] if found['level'] == 'error']
    assert 'backend extension: acme' in error['found']
    assert 'TORCH_DEVICE_BACKEND_AUTOLOAD=0' in error['found']
    assert symbol in error['found']


def test_mmcv_without_operators(tmp_path, monkeypatch):
    package(package(tmp_path, 'mmcv'), 'ops', 'import mmcv._ext')
    monkeypatch.syspath_prepend(str(tmp_path))
    tasks = versions.modules_to_try()
    assert tasks[tasks.index('mmcv') + 1] == 'mmcv.ops'
    found = list(run_isolated(versions.__name__, ['mmcv', 'mmcv.ops'], {}, 60))
    assert the(found, 'ok').found == 'import mmcv works'
    assert 'MMCV_WITH_OPS=1' in the(found, 'error', 'import mmcv.ops', 'mmcv._ext').remedy


def test_a_copy_that_hides_an_installed_package(tmp_path, monkeypatch):
    pytest.importorskip('mmcv')
    path = package(tmp_path, 'mmcv', "__version__ = '9.0.0'")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = list(run_isolated(versions.__name__, ['mmcv'], {}, 60))
    said = the(found, 'note').found
    assert said.startswith(f'import mmcv finds version 9.0.0 in {path}, before the installed mmcv')
