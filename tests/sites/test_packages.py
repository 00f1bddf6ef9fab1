"""Configs of installed packages, with and without the pkg_resources that MMEngine needs."""

import argparse
import sys
from pathlib import Path

import pytest
from mmengine.config import Config
from mmengine.utils import package_utils

import mmdevplug
from mmdevplug.cli.common import add_common_arguments, load_config
from mmdevplug.errors import DevPlugError
from tests.commands import environment, python

#: MMEngine knows a package of this name, which is not installed.
PACKAGE, NAME = 'mmtrack', 'sites/tiny_config'


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package as mim lays it out: one config, its base and an index."""
    folder = tmp_path / 'site-packages' / PACKAGE
    for place in ('.mim/configs/sites', '.mim/configs/_base_', 'configs'):
        (folder / place).mkdir(parents=True)
    (folder / '__init__.py').touch()
    (folder / '.mim/model-index.yml').write_text('Import: [configs/metafile.yml]\n')
    (folder / '.mim/configs/metafile.yml').write_text(
        f'Models: [{{Name: tiny, Config: configs/{NAME}.py}}]\n'
    )
    (folder / '.mim/configs/_base_/default.py').write_text('answer = 42\n')
    (folder / f'.mim/configs/{NAME}.py').write_text("_base_ = '../_base_/default.py'\n")
    (folder / 'configs/new_style.py').write_text('answer = 42\n')
    (folder / 'configs/__init__.py').touch()
    monkeypatch.syspath_prepend(str(folder.parent))
    return PACKAGE


@pytest.fixture
def no_pkg_resources(monkeypatch):
    monkeypatch.setitem(sys.modules, 'pkg_resources', None)  # cannot be imported


def load(config, *arguments):
    parser = argparse.ArgumentParser()
    add_common_arguments(parser)
    return load_config(parser.parse_args([str(config), *arguments]))


@pytest.mark.parametrize('inside', [True, False], ids=['base', 'command line'])
def test_without_pkg_resources_the_message_says_what_to_type(
    package, no_pkg_resources, tmp_path, inside
):
    config = tmp_path / 'mine.py'
    config.write_text(f"_base_ = '{package}::_base_/default.py'\n")
    named = config if inside else f'{package}::{NAME}.py'
    if 'pkg_resources' not in Path(package_utils.__file__).read_text():
        assert load(named).answer == 42  # OneDL's MMEngine
        return
    with pytest.raises(DevPlugError, match=r'setuptools 81 .* pip install "setuptools<81"'):
        load(named)


def test_command_line_takes_a_config_of_a_package(package):
    cfg = load(f'{package}::{NAME}.py', '--accelerator', 'cpu')
    assert cfg.answer == 42
    assert cfg.runner_type == 'DeviceRunner'
    assert cfg.work_dir == 'work_dirs/tiny_config'


@pytest.mark.parametrize('key', ['accelerator', 'env_cfg.dist_cfg'])
def test_accelerator_that_is_a_name_takes_options_of_the_command_line(tmp_path, key):
    config = tmp_path / 'mine.py'
    config.write_text("accelerator = 'cpu'\n")
    cfg = load(config, '--cfg-options', f'{key}.backend=gloo')
    assert cfg.accelerator == dict(type='cpu', backend='gloo')


def test_bases_of_a_package(package, tmp_path):
    config = tmp_path / 'mine.py'
    config.write_text(f"_base_ = '{package}::_base_/default.py'\n")
    assert load(config).answer == 42


def test_read_base_of_a_package(package, tmp_path):
    config = tmp_path / 'mine.py'
    config.write_text(
        'from mmengine.config import read_base\n'
        'with read_base():\n'
        f'    from {package}.configs.new_style import *\n'
        '    from mmdevplug.configs._base_.accelerators.cpu import *\n'
    )
    cfg = load(config)
    assert cfg.answer == 42
    assert cfg.accelerator.type == 'cpu'


@pytest.mark.parametrize(
    ('line', 'built'),
    [
        ("__import__('mmdevplug').follow_runner_type()", 'DeviceRunner'),
        # MMEngine reads custom_imports in old-style configs alone.
        ("custom_imports = dict(imports=['mmdevplug.autopatch'])", 'Runner'),
    ],
)
def test_a_script_builds_our_runner_from_a_new_style_config(tmp_path, line, built):
    path = tmp_path / 'mine.py'
    path.write_text(f"from torch.nn import Linear\n{line}\naccelerator = dict(type='cpu')\n")
    script = (
        'from mmengine.config import Config\nfrom mmengine.runner import Runner\n'
        f'cfg = Config.fromfile({str(path)!r})\n'
        'runner = Runner.__new__(Runner, cfg=cfg)\nprint(type(runner).__name__)'
    )
    done = python('-c', script)
    assert done.stdout.splitlines()[-1:] == [built], done.stderr


@pytest.mark.parametrize('way', ['command', 'script'])
def test_custom_imports_of_a_new_style_config_are_imported(tmp_path, way):
    (tmp_path / 'registers_things.py').write_text("print('registered')")
    path = tmp_path / 'mine.py'
    path.write_text(
        'from mmengine.config import read_base\nwith read_base():\n'
        '    from mmdevplug.configs._base_.accelerators.cpu import *\n'
        "custom_imports = dict(imports=['registers_things'], allow_failed_imports=False)\n"
    )
    build = dict(
        command=f'from mmdevplug.config.load import load_file\nload_file({str(path)!r})',
        script='from mmengine.config import Config\nfrom mmengine.registry import RUNNERS\n'
        f'RUNNERS.build(Config.fromfile({str(path)!r}))',  # which has no model
    )
    done = python('-c', build[way], env=environment(tmp_path))
    assert done.stdout.splitlines()[:1] == ['registered'], done.stderr


def test_our_base_config_asks_for_no_package(no_pkg_resources, tmp_path):
    config = tmp_path / 'mine.py'
    config.write_text("_base_ = __import__('mmdevplug').base_config('gcu')\n")
    assert Config.fromfile(str(config)).accelerator.type == 'gcu'
    assert mmdevplug.base_config('gcu').endswith('gcu.py')


def test_absent_packages_are_named(package):
    with pytest.raises(DevPlugError, match='mmfewshot is not installed'):
        load('mmfewshot::detection/any_config.py')


def test_what_is_neither_a_file_nor_of_a_package():
    with pytest.raises(DevPlugError, match='one of an installed package'):
        load('no_such_file.py')
