"""OpenMMLab's packages that do not fit each other: versions, the range and a command are told."""

import mmengine
import pytest
import torch

from mmdevplug.checks import versions
from mmdevplug.checks.isolated import run_isolated
from mmdevplug.utils.broken_imports import distribution, install_command
from tests.cli.running import config, mmdevplug, only_message

from .running import package

#: What is installed as mmcv, by its own name: `mmcv-lite` where it was not compiled.
MMCV = distribution('mmcv') or 'mmcv'
HERE = f'torch {torch.__version__} and Python'
NEEDS_MMDET = pytest.mark.skipif(
    distribution('mmdet') != 'mmdet', reason="needs OpenMMLab's mmdet, which refuses versions"
)


@NEEDS_MMDET
def test_mmcv_that_is_too_new_is_named_once_for_all_ranks(tmp_path):
    package(tmp_path, 'mmcv', "__version__ = '2.2.0'\n")
    path = config(tmp_path, "custom_imports = dict(imports=['mmdet.models'])")
    done = mmdevplug(tmp_path, 'train', path, '--nproc', 2)
    told, end = [line for line in done.stderr.splitlines() if line.startswith('mmdevplug: ')]
    assert done.returncode == 1
    assert 'Traceback' not in done.stderr
    assert end.startswith('mmdevplug: rank ')
    assert told[len('mmdevplug: ') :] in end
    assert 'mmdet 3.3.0 needs mmcv >=2.0.0rc4,<2.2.0, but mmcv 2.2.0 is installed' in told
    assert str(tmp_path / 'mmcv') in told
    assert '"mmcv>=2.0.0rc4,<2.2.0"' in told
    assert '--no-build-isolation' in told
    assert '://' not in told


@NEEDS_MMDET
def test_package_that_only_the_default_scope_names(tmp_path):
    package(tmp_path, 'mmcv', "__version__ = '1.7.0'\n")
    lines = "default_scope = 'mmdet'\nmodel = dict(_delete_=True, type='RetinaNet')"
    told = only_message(mmdevplug(tmp_path, 'train', config(tmp_path, lines)))
    assert 'mmdet 3.3.0 needs mmcv >=2.0.0rc4,<2.2.0, but mmcv 1.7.0 is installed' in told


BROKEN = """
from mmengine.registry import MODELS as ROOT, Registry
MODELS = Registry('model', parent=ROOT, scope='mmother', locations=['mmother.models'])
"""


@pytest.mark.parametrize(
    ('extension', 'told'),
    [
        (None, 'has no operators (mmcv._ext) compiled for torch'),
        (
            "raise ImportError('mmcv/_ext.cpython-311.so: undefined symbol: _ZN2at', "
            "name='mmcv._ext')",
            'undefined symbol: _ZN2at',
        ),
    ],
)
def test_operators_that_are_missing_or_for_another_torch(tmp_path, extension, told):
    mmcv = package(tmp_path, 'mmcv', "__version__ = '2.1.0'\n")
    if extension is not None:
        (mmcv / '_ext.py').write_text(extension)
        (mmcv / '_ext.other.so').write_text('')
    other = package(tmp_path, 'mmother')
    (other / 'registry.py').write_text(BROKEN)
    (other / 'models.py').write_text('import mmcv._ext\n')
    lines = "default_scope = 'mmother'\nmodel = dict(_delete_=True, type='Tiny')"
    message = only_message(mmdevplug(tmp_path, 'train', config(tmp_path, lines)))
    assert told in message
    assert f'{MMCV} 2.1.0' in message
    assert HERE in message
    assert 'MMCV_WITH_OPS=1 pip install' in message
    assert ('are not for' in message) == (extension is not None)


def test_real_library_that_no_linker_takes(tmp_path):
    """A file that is no library, where mmcv has its own."""
    mmcv = package(tmp_path, 'mmcv', "__version__ = '2.1.0'\n")
    suffix = next(s for s in __import__('importlib.machinery').machinery.EXTENSION_SUFFIXES)
    (mmcv / f'_ext{suffix}').write_text('compiled for something else')
    path = config(tmp_path, "custom_imports = dict(imports=['mmcv._ext'])")
    message = only_message(mmdevplug(tmp_path, 'train', path))
    assert f'{MMCV} 2.1.0 ({mmcv}/_ext{suffix}) are not for' in message
    assert install_command('mmcv') in message


def test_mmengine_that_a_package_refuses(tmp_path):
    package(
        tmp_path,
        'mmother',
        """
        import mmengine
        from mmengine.utils import digit_version
        __version__ = '4.5.6'
        mmengine_minimum_version = '0.1.0'
        mmengine_maximum_version = '0.9.0'
        assert (digit_version(mmengine.__version__) >= digit_version(mmengine_minimum_version)
            and digit_version(mmengine.__version__) <= digit_version(mmengine_maximum_version)), (
            f'MMEngine=={mmengine.__version__} is used but incompatible. '
            f'Please install mmengine>={mmengine_minimum_version}, <={mmengine_maximum_version}.')
        """,
    )
    path = config(tmp_path, "custom_imports = dict(imports=['mmother'])")
    told = only_message(mmdevplug(tmp_path, 'train', path))
    assert 'mmother' in told
    assert f'mmengine >=0.1.0,<=0.9.0, but mmengine {mmengine.__version__} is installed' in told
    assert f'pip install "{distribution("mmengine")}>=0.1.0,<=0.9.0"' in told


def test_other_failing_imports_stay_what_they_are(tmp_path):
    (tmp_path / 'mine.py').write_text("assert False, 'my own'\n")
    done = mmdevplug(
        tmp_path, 'train', config(tmp_path, "custom_imports = dict(imports=['mine'])")
    )
    assert done.returncode == 1
    assert 'AssertionError: my own' in done.stderr


@NEEDS_MMDET
def test_doctor_names_what_an_installed_package_refuses(tmp_path, monkeypatch):
    package(tmp_path, 'mmcv', "__version__ = '2.2.0'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (found,) = run_isolated(versions.__name__, ['mmdet'], {}, 120)
    assert found.level == 'error'
    assert 'mmdet 3.3.0 needs mmcv >=2.0.0rc4,<2.2.0, but mmcv 2.2.0 is installed' in found.found
    assert found.remedy.endswith('"mmcv>=2.0.0rc4,<2.2.0"')
