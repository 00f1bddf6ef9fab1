"""What a release is made of: an sdist whose tests run, and a wheel that trains by itself."""

import os
import re
import subprocess
import sys
import tarfile

import pytest

from tests.test_mim import copy_checkout

BUILD = 'import sys; from setuptools import build_meta as b; b.build_{}(sys.argv[1])'


def python(*arguments, cwd, path=''):
    """Run this Python with nothing of the checkout on its path."""
    environ = dict(os.environ, PYTHONPATH=str(path), OMP_NUM_THREADS='1')
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(
        command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope='module')
def sdist(tmp_path_factory):
    """The folder that an sdist unpacks to, and what the checkout has."""
    folder = tmp_path_factory.mktemp('sdist')
    source = copy_checkout(folder / 'checkout')
    files = {str(path.relative_to(source)) for path in source.rglob('*') if path.is_file()}
    python('-c', BUILD.format('sdist'), folder, cwd=source)
    (archive,) = folder.glob('mmdevplug-*.tar.gz')
    with tarfile.open(archive) as opened:
        opened.extractall(folder / 'unpacked')
    (unpacked,) = (folder / 'unpacked').iterdir()
    return unpacked, files


@pytest.fixture(scope='module')
def installed(sdist, tmp_path_factory):
    """A folder that holds the wheel of the sdist and nothing else."""
    folder = tmp_path_factory.mktemp('wheel')
    python('-c', BUILD.format('wheel'), folder, cwd=sdist[0])
    (wheel,) = folder.glob('*.whl')
    pip = ['-m', 'pip', 'install', '-q', '--no-deps', '--no-compile', '--no-index']
    python(*pip, '--target', folder / 'target', wheel, cwd=folder)
    return folder / 'target'


def test_an_sdist_has_what_the_checkout_has(sdist):
    unpacked, files = sdist
    assert {'CHANGELOG.md', 'Makefile', 'docs/en/index.rst', 'tests/conftest.py'} <= files
    missing = {name for name in files if not (unpacked / name).is_file()}
    assert missing == {'.gitignore'} & files


def test_the_description_of_a_release_has_no_dead_links(sdist):
    text = (sdist[0] / 'PKG-INFO').read_text(encoding='utf-8').partition('\n\n')[2]
    assert text.startswith('# mmdevplug')
    links = re.findall(r'\]\(([^)]*)\)', text)
    assert len(links) > 3
    assert [link for link in links if not link.startswith('https://')] == []


@pytest.mark.long
def test_the_tests_of_an_sdist_run(sdist):
    tests = ['tests/config/test_model_parallel.py', 'tests/test_conventions.py']
    options = ['-q', '-p', 'no:cacheprovider']
    printed = python('-m', 'pytest', *options, *tests, cwd=sdist[0])
    assert re.search(r'\d+ passed', printed)
    assert 'failed' not in printed


@pytest.mark.long
def test_a_wheel_trains_from_an_empty_folder(installed, tmp_path):
    assert not [*installed.rglob('compat*'), *installed.rglob('peers')]
    config = installed / 'mmdevplug' / '.mim' / 'configs' / 'digits' / 'digits_cpu.py'
    short = ['--cfg-options', 'train_cfg.max_epochs=2', 'default_hooks.checkpoint.interval=2']
    command = ['-m', 'mmdevplug', 'train', config, '--verbose', *short]
    printed = python(*command, '--work-dir', tmp_path / 'out', cwd=tmp_path, path=installed)
    accuracies = re.findall(r'Epoch\(val\) \[2\].* accuracy: ([\d.]+)', printed)
    assert float(accuracies[-1]) > 50
    assert (tmp_path / 'out' / 'epoch_2.pth').is_file()
    where = 'import mmdevplug; print(mmdevplug.__file__, mmdevplug.base_config("gcu"))'
    files = python('-c', where, cwd=tmp_path, path=installed).split()
    assert [file.startswith(f'{installed}/') for file in files] == [True, True]
