"""OpenMMLab's package manager: installs the wheel, finds our configs, trains and tests them.

openmim is no part of the development environment: opendatalab, which it requires, pins old
releases of setuptools, rich and packaging, and model-index installs a package named ``tests``. It
is installed here without what it requires, into an environment of the test's own.
"""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
import venv
from pathlib import Path

import psutil
import pytest
import yaml

from tests.jobs import ROOT

#: openmim, and what the commands tried here import.
NEEDED = ['openmim==0.3.9', 'model-index==0.1.11']
NEEDED += ['colorama', 'tabulate', 'ordered-set', 'pandas']
NEEDED += ['requests', 'urllib3', 'certifi', 'charset-normalizer', 'idna']

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


class Environment:
    """A virtual environment that sees the packages of this one, and not the checkout."""

    def __init__(self, folder):
        self.folder, self.home = folder / 'env', folder / 'home'
        self.home.mkdir()
        venv.create(self.folder, with_pip=True)
        shared = folder / 'shared'
        shared.mkdir()
        for entry in Path(sysconfig.get_paths()['purelib']).iterdir():
            if 'mmdevplug' not in entry.name and entry.name not in ('pip', 'tests'):
                (shared / entry.name).symlink_to(entry)
        (site,) = self.folder.glob('lib/python*/site-packages')
        (site / 'shared.pth').write_text(f'{shared}\n')
        self.site = site

    def variables(self):
        return {
            **{k: v for k, v in os.environ.items() if k != 'PYTHONPATH'},
            'HOME': str(self.home),
            'OMP_NUM_THREADS': '1',
            'PATH': f'{self.folder}/bin{os.pathsep}{os.environ["PATH"]}',
        }

    def run(self, *command, cwd, check=True):
        done = subprocess.run(
            [str(self.folder / 'bin' / command[0]), *map(str, command[1:])],
            cwd=cwd,
            env=self.variables(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
        )
        if check:
            assert done.returncode == 0, done.stdout
        return done


def copy_checkout(source):
    """Copy this checkout, or the sdist that it is, without environments and build folders."""
    command = ['git', 'ls-files', '-co', '--exclude-standard']
    if (ROOT / 'PKG-INFO').exists():
        command = ['cat', next(ROOT.glob('*.egg-info')) / 'SOURCES.txt']
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for name in names.stdout.splitlines():
        if (ROOT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name, follow_symlinks=False)
    return source


def build_wheel(folder):
    """A wheel of this checkout."""
    source = copy_checkout(folder / 'source')
    command = [sys.executable, '-m', 'pip', 'wheel', '-q', '--no-deps', '--no-build-isolation']
    subprocess.run([*command, '-w', folder / 'wheels', source], check=True)
    return folder / 'wheels'


@pytest.fixture(scope='module')
def environment(tmp_path_factory):
    """An environment into which mim has installed the wheel."""
    folder = tmp_path_factory.mktemp('mim')
    made = Environment(folder)
    pip = ['python', '-m', 'pip', '-q', '--disable-pip-version-check', 'install', '--no-deps']
    got = made.run(*pip, *NEEDED, cwd=folder, check=False)
    if got.returncode:
        told = got.stdout.strip().splitlines()[-1]
        assert re.search('No matching distribution|connection', got.stdout, re.IGNORECASE), told
        pytest.skip(f'no package index to get openmim from: {told}')
    wheels = build_wheel(folder)
    installing = ['install', 'mmdevplug', '--no-index', '-f', wheels, '--no-deps']
    assert 'Successfully installed mmdevplug' in made.run('mim', *installing, cwd=folder).stdout
    return made


def test_mim_lists_and_searches(environment, tmp_path):
    assert re.search(
        r'mmdevplug +\d', environment.run('mim', 'list', '--all', cwd=tmp_path).stdout
    )
    found = environment.run('mim', 'search', 'mmdevplug', '--display-width', 200, cwd=tmp_path)
    index = yaml.safe_load((ROOT / 'model-index.yml').read_text())
    for path in index['Import']:
        for model in yaml.safe_load((ROOT / path).read_text())['Models']:
            assert (ROOT / model['Config']).is_file()
            config = Path(model['Config']).stem
            assert config in found.stdout
            (result,) = model['Results']
            (value,) = result['Metrics'].values()
            assert str(value) in found.stdout
    assert (environment.site / 'mmdevplug' / '.mim' / 'tools' / 'train.py').is_file()


def test_mim_trains_and_tests(environment, tmp_path):
    short = ['--cfg-options', 'train_cfg.max_epochs=2', 'default_hooks.checkpoint.interval=2']
    trained = environment.run(
        'mim', 'train', 'mmdevplug', 'digits_cpu.py', '--work-dir', tmp_path / 'out', *short,
        cwd=tmp_path,
    )  # fmt: skip
    assert 'Training finished successfully' in trained.stdout
    assert str(environment.site) in trained.stdout  # the wheel's config, not the checkout's
    tested = environment.run(
        'mim', 'test', 'mmdevplug', 'digits_cpu.py', '--checkpoint', tmp_path / 'out/epoch_2.pth',
        '--work-dir', tmp_path / 'out', cwd=tmp_path,
    )  # fmt: skip
    assert 'Testing finished successfully' in tested.stdout
    accuracy = re.findall(r'accuracy: ([\d.]+)', tested.stdout)
    assert float(accuracy[-1]) > 50


def test_mim_trains_in_two_processes(environment, tmp_path):
    done = environment.run(
        'mim', 'train', 'mmdevplug', 'digits_cpu.py', '--gpus', 2, '--launcher', 'pytorch',
        '--work-dir', tmp_path / 'out', '--cfg-options', 'train_cfg.max_epochs=1',
        cwd=tmp_path,
    )  # fmt: skip
    assert 'Training finished successfully' in done.stdout
    assert "backend 'gloo'" in done.stdout


def test_what_mim_started_ends_with_it(environment, tmp_path):
    """`mim` passes no signal on; its ranks notice its end, save and end."""
    work_dir = tmp_path / 'out'
    command = [environment.folder / 'bin' / 'mim', 'train', 'mmdevplug', 'digits_cpu.py']
    command += ['--gpus', 2, '--launcher', 'pytorch', '--work-dir', work_dir]
    command += ['--cfg-options', 'train_cfg.max_epochs=2000', 'train_cfg.val_interval=2000']
    with open(tmp_path / 'printed', 'w') as output:
        process = subprocess.Popen(
            list(map(str, command)), cwd=tmp_path, env=environment.variables(), stdout=output,
            stderr=output,
        )  # fmt: skip
    below = []
    try:
        deadline = time.monotonic() + 200
        while 'Epoch(train)' not in (tmp_path / 'printed').read_text():
            assert process.poll() is None, (tmp_path / 'printed').read_text()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        below = psutil.Process(process.pid).children(recursive=True)
        assert len(below) >= 3  # torchrun and two ranks
        process.terminate()
        assert process.wait(60) != 0
        _, left = psutil.wait_procs(below, timeout=100)
        assert left == []
    finally:
        for one in [process, *below]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
    assert 'interrupted_iter_' in (work_dir / 'last_checkpoint').read_text()


def test_mim_downloads_no_weights(environment, tmp_path):
    """There are none to download, which mim says in its own way."""
    done = environment.run(
        'mim', 'download', 'mmdevplug', '--config', 'digits_cpu', cwd=tmp_path, check=False
    )
    assert done.returncode != 0
    assert 'weight' in done.stdout
