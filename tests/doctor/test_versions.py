"""Versions that do not go together, and packages that cannot be imported."""

from importlib import metadata

import pytest
import torch

from mmdevplug.doctor import versions
from mmdevplug.doctor.isolated import Death, run_isolated

from .running import examined, the

GOOD = dict(
    python='3.11.7', torch='2.9.0+cpu', numpy='2.4.6', mmengine='0.10.7', setuptools='80.9.0'
)
#: The T20's.
OF_110 = dict(torch='1.10.0', numpy='1.23.5', setuptools='75.3.0', protobuf='3.20.3')


def levels(**changed):
    installed = {k: v for k, v in {**GOOD, **changed}.items() if v is not None}
    return [(f.level, f.found, f.remedy) for f in versions.check_rules(installed)]


def test_versions_that_go_together_are_no_error():
    assert [level for level, _, _ in levels(torch_xla='2.9.0', torchvision='0.24.0')] == ['note']


def test_what_goes_together_on_a_t20_is_no_warning():
    assert levels(**OF_110, tensorboard='2.14.0') == []
    # Without TensorBoard nothing imports them.
    assert levels(**dict(OF_110, protobuf='5.0.0')) == []


@pytest.mark.parametrize(
    ('changed', 'level', 'named', 'remedy'),
    [
        (dict(torch='1.9.1'), 'error', '1.9.1', '1.10 or later'),
        (dict(mmengine='0.9.0'), 'error', '0.9.0', 'pip install "mmengine>=0.10.0,<1.0"'),
        (dict(torch_xla='2.8.1'), 'error', '2.8.1', 'pip install "torch_xla==2.9.*"'),
        (dict(torchvision='0.23.0'), 'error', '0.23.0', '"torchvision==0.24.*"'),
        (dict(torch='1.13.1', torchvision='0.13.1'), 'error', '0.13.1', '"torchvision==0.14.*"'),
        (dict(torch='2.2.2'), 'error', 'numpy 2.4.6 beside torch 2.2.2', '"numpy<2"'),
        (dict(setuptools='81.0.0'), 'warning', '81.0.0', 'pip install "setuptools<81"'),
        (dict(setuptools=None), 'warning', 'not installed', 'pip install "setuptools<81"'),
        (
            dict(OF_110, protobuf='4.25.0', tensorboard='2.14.0'),
            *('warning', 'protobuf 4.25.0', '"protobuf<4"'),
        ),
        (dict(OF_110, numpy='1.24.4'), 'warning', 'numpy 1.24.4', '"numpy<1.24"'),
        ({'mmcv': '2.1.0', 'mmcv-lite': '2.1.0'}, 'error', '2.1.0', 'pip uninstall'),
        (
            {'mmcv-lite': '2.1.0', 'onedl-mmcv': '2.3.6'},
            *(
                'error',
                'mmcv-lite 2.1.0 beside onedl-mmcv',
                'pip uninstall -y mmcv-lite onedl-mmcv',
            ),
        ),
        (
            {'onedl-mmengine': '0.10.12'},
            *(
                'error',
                'mmengine 0.10.7 beside onedl-mmengine 0.10.12',
                'pip uninstall -y mmengine',
            ),
        ),
        (
            {'mmsegmentation': '1.2.2', 'onedl-mmsegmentation': '1.4.2'},
            *('error', 'onedl-mmsegmentation 1.4.2', 'pip install onedl-mmsegmentation'),
        ),
        (
            {'mmengine': None, 'onedl-mmengine': '1.0.0'},
            *('error', 'onedl-mmengine 1.0.0', 'pip install "onedl-mmengine>=0.10.0,<1.0"'),
        ),
        (
            dict(mmpretrain='1.2.0', transformers='5.1.0', pycocotools='2.0.11'),
            *('error', 'transformers 5.1.0', 'pip install "transformers<4.52"'),
        ),
    ],
)
def test_versions_that_do_not(changed, level, named, remedy):
    worst = [found for found in levels(**changed) if found[0] != 'note']
    assert len(worst) >= 1
    assert any(
        found[0] == level and named in found[1] and remedy in found[2] for found in worst
    ), worst


def test_onedls_packages_alone_go_together():
    # Its checkpoints are read by PyTorch 2.6 and later, so there is no note either.
    assert levels(**{'mmengine': None, 'onedl-mmengine': '0.10.12', 'onedl-mmcv': '2.3.6'}) == []


def listed(folder, package, version):
    """Let pip and importlib list a package of no files."""
    info = folder / f'{package.replace("-", "_")}-{version}.dist-info'
    info.mkdir()
    (info / 'METADATA').write_text(f'Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n')


OF_ONEDL = "from importlib.metadata import version\n__version__ = version('onedl-mmrotate')\n"


@pytest.mark.parametrize(
    ('packages', 'version_file', 'told'),
    [
        (['mmrotate'], "__version__ = '1.0.0rc1'\n", None),
        (['onedl-mmrotate'], OF_ONEDL, None),
        (['mmrotate'], OF_ONEDL, 'mmrotate 1.2.3 is listed, but '),
        (['onedl-mmrotate'], "__version__ = '1.0.0rc1'\n", 'has files of mmrotate'),
        (
            ['onedl-mmrotate'],
            None,
            'onedl-mmrotate 1.2.3 is listed, but there is no module mmrotate',
        ),
        (['mmrotate', 'onedl-mmrotate'], OF_ONEDL, 'mmrotate 1.2.3 beside onedl-mmrotate 1.2.3'),
    ],
)
def test_files_of_one_package_over_those_of_the_other(
    tmp_path, monkeypatch, packages, version_file, told
):
    """mmrotate, which this environment has from neither."""
    for package in packages:
        listed(tmp_path, package, '1.2.3')
    if version_file is not None:
        (broken(tmp_path, 'mmrotate', '') / 'version.py').write_text(version_file)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(versions, 'modules_to_try', list)
    found = [one for one in versions.examine() if one.level == 'error']
    ours = [one for one in found if 'mmrotate' in one.found]
    if told is None:
        assert ours == []
        return
    (one,) = ours
    assert told in one.found
    again = 'pip uninstall -y mmrotate onedl-mmrotate && pip install onedl-mmrotate'
    if len(packages) == 1:
        again = f'pip install --force-reinstall --no-deps {packages[0]}==1.2.3'
    assert again in one.remedy


def broken(folder, name, line):
    package = folder / name
    package.mkdir()
    (package / '__init__.py').write_text(line)
    return package


@pytest.mark.parametrize(
    ('line', 'told'),
    [
        ('raise OSError("libc10_cuda.so: cannot open shared object file")', 'libc10_cuda.so'),
        ('import os; os.abort()', 'SIGABRT'),
        ('import sys; sys.exit(7)', 'exit status 7'),
    ],
)
def test_packages_behind_a_broken_one_are_still_tried(tmp_path, monkeypatch, line, told):
    broken(tmp_path, 'torchvision', line)
    monkeypatch.setenv('PYTHONPATH', str(tmp_path), prepend=':')
    found = list(run_isolated(versions.__name__, ['json', 'torchvision', 'csv'], {}, 60))
    assert [getattr(told, 'level', 'died') for told in found] in (
        ['ok', 'error', 'ok'],
        ['ok', 'died', 'ok'],
    )
    described = found[1].describe() if isinstance(found[1], Death) else found[1].found
    assert told in described
    assert 'import torchvision' in described


def test_broken_torch_is_a_finding_and_no_traceback(tmp_path):
    broken(tmp_path, 'torch', 'raise OSError("libcudart.so.12: no such file")')
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
    broken(tmp_path, 'torch_acme', f'def load():\n    raise ImportError({symbol!r})\n')
    info = tmp_path / 'torch_acme-1.0.dist-info'
    info.mkdir()
    (info / 'METADATA').write_text(
        'Metadata-Version: 2.1\nName: torch-acme\nVersion: 1.0\nRequires-Dist: torch==2.1.*\n'
    )
    (info / 'entry_points.txt').write_text('[torch.backends]\nacme = torch_acme:load\n')
    done, report = examined(tmp_path, paths=[tmp_path])
    assert done.returncode == 1
    (error,) = [found for found in report['findings'] if found['level'] == 'error']
    assert 'import torch fails because of the package torch-acme' in error['found']
    assert symbol in error['found']
    release = metadata.version('torch')
    assert f'asks for torch==2.1.*; installed is torch {release}' in error['why']
    assert 'pip uninstall torch-acme' in error['remedy']


def test_mmcv_without_operators(tmp_path, monkeypatch):
    package = broken(tmp_path, 'mmcv', '')
    (package / 'ops').mkdir()
    (package / 'ops' / '__init__.py').write_text('import mmcv._ext')
    monkeypatch.setenv('PYTHONPATH', str(tmp_path), prepend=':')
    monkeypatch.syspath_prepend(str(tmp_path))
    tasks = versions.modules_to_try()
    assert tasks[tasks.index('mmcv') + 1] == 'mmcv.ops'
    found = list(run_isolated(versions.__name__, ['mmcv', 'mmcv.ops'], {}, 60))
    assert the(found, 'ok').found == 'import mmcv works'
    assert 'MMCV_WITH_OPS=1' in the(found, 'error', 'import mmcv.ops', 'mmcv._ext').remedy
