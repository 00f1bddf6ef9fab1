"""Installing leaves the vendor's torch, numpy and mmcv alone, with every extra."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.jobs import ROOT
from tests.repos.segmentation import make_cityscapes, segformer
from tests.repos.training import load_config, write_config
from tests.t20.conftest import FOLDER, ON_T20

pytestmark = [*ON_T20, pytest.mark.timeout(600)]

#: What the vendor's container brings, or is built against.
VENDORS = {'torch', 'numpy', 'mmcv', 'mmcv-lite', 'protobuf', 'setuptools', 'mmengine'}

#: Extras that need a later PyTorch, and the package that pip refuses on Python 3.8.
REFUSED = {
    'onedl': 'onedl-mmengine',
    'xla': 'torch==2.9.0',
    'llama': 'peft',
    'loops': 'trl==1.16.0',
}


def extras():
    """The extras of ``setup.py``, read without running it."""
    import ast

    for node in ast.parse((ROOT / 'setup.py').read_text()).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == 'EXTRAS_REQUIRE':
            return sorted(ast.literal_eval(node.value))
    raise AssertionError('setup.py has no EXTRAS_REQUIRE')


def checkout(folder):
    """Copy what installing needs, so that nothing is built in the real one."""
    for name in ('mmdevplug', 'configs', 'tools'):
        skip = shutil.ignore_patterns('__pycache__', '.mim', 'work_dirs')
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=skip)
    for name in ('setup.py', 'pyproject.toml', 'README.md', 'model-index.yml', 'MANIFEST.in'):
        shutil.copy2(ROOT / name, folder / name)
    return folder


#: Not in the container: ours, which is to be installed, and what MMEngine and mmseg import where
#: they find it, which takes each rank a second.
ABSENT = ('mmdevplug', '__editable__', 'transformers', 'mmdet')


def container(folder):
    """Make an environment that has packages of this one, as the vendor's container has its."""
    command = [sys.executable, '-m', 'venv', '--without-pip', folder]
    subprocess.run(command, check=True, timeout=120)
    (packages,) = folder.glob('lib/python3.8/site-packages')
    brought = folder / 'brought'
    brought.mkdir()
    for path in Path(sysconfig.get_paths()['purelib']).iterdir():
        if not path.name.startswith(ABSENT):
            (brought / path.name).symlink_to(path)
    # Outside of the environment's own folder, where pip would remove what it replaces.
    (packages / 'vendor.pth').write_text(f'{brought}\n{FOLDER}\n')
    (folder / 'bin' / 'pip').write_text('#!/bin/sh\nexec python -m pip "$@"\n')
    (folder / 'bin' / 'pip').chmod(0o755)
    return packages


def pip(*arguments):
    command = [sys.executable, '-m', 'pip', '--disable-pip-version-check', *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=550)


@pytest.mark.parametrize('extra', sorted({*extras()} - {*REFUSED}))
def test_an_extra_replaces_nothing(tmp_path, extra):
    report = tmp_path / 'report.json'
    done = pip('install', '--dry-run', '--report', report, f'{checkout(tmp_path)}[{extra}]')
    assert done.returncode == 0, done.stderr[-2000:]
    chosen = {
        each['metadata']['name'].lower() for each in json.loads(report.read_text())['install']
    }
    assert 'mmdevplug' in chosen
    assert not chosen & VENDORS


@pytest.mark.parametrize('extra', sorted(REFUSED))
def test_an_extra_that_would_replace_torch_is_refused(tmp_path, extra):
    done = pip('install', '--dry-run', f'{checkout(tmp_path)}[{extra}]')
    assert done.returncode != 0
    assert REFUSED[extra] in done.stdout + done.stderr


def test_pip_install_changes_nothing_that_is_there(tmp_path):
    packages = container(tmp_path / 'vendor')
    python = tmp_path / 'vendor' / 'bin' / 'python'

    def freeze():
        done = subprocess.run(
            [python, '-m', 'pip', 'freeze', '--all'], stdout=subprocess.PIPE, text=True, check=True
        )
        return sorted(line for line in done.stdout.splitlines() if 'mmdevplug' not in line)

    before = freeze()
    assert 'torch==1.10.0' in before
    source = checkout(tmp_path)
    command = [python, '-m', 'pip', 'install', '--quiet', '--disable-pip-version-check', source]
    subprocess.run(command, check=True, timeout=500)
    assert freeze() == before
    assert (packages / 'mmdevplug' / 'version.py').exists()


def commands_of(language):
    """The commands of the page on the T20."""
    page = (ROOT / 'docs' / language / 'enflame_t20.md').read_text()
    return re.search('```bash\n(.*?)```', page, re.DOTALL).group(1)


def test_both_pages_have_the_same_commands():
    assert commands_of('en') == commands_of('zh_cn')
    assert len(commands_of('en').splitlines()) == 10


@pytest.mark.operators
@pytest.mark.timeout(1200)
def test_the_commands_of_the_page(torch_gcu, tmp_path):
    """From the container to a model of mmseg that was trained, resumed and tested."""
    container(tmp_path / 'vendor')
    checkout_folder, mine = tmp_path / 'mmdevplug', tmp_path / 'my_repository'
    checkout_folder.mkdir()
    checkout(checkout_folder)
    mine.mkdir()
    root = make_cityscapes(tmp_path / 'cityscapes')
    recipe = segformer(root)
    written = write_config(tmp_path / 'stock.py', recipe)
    load_config(written, recipe, tmp_path / 'unused').dump(str(mine / 'my_config.py'))
    done = subprocess.run(
        ['bash', '-euxc', commands_of('en')],
        cwd=tmp_path,
        env=dict(
            HOME=os.environ['HOME'],
            OMP_NUM_THREADS='1',
            PATH=f'{tmp_path}/vendor/bin:/usr/local/bin:/usr/bin:/bin',
            **{name: value for name, value in os.environ.items() if name.startswith('PIP_')},
        ),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1150,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert re.search(r'1\.10\.0\S* 8 cards', done.stdout)
    accuracy = re.findall(r'accuracy: ([0-9.]+)', done.stdout)
    assert float(accuracy[-1]) >= 97.0
    assert 'Iter(test)' in done.stdout
    assert (mine / 'work_dirs' / 'mine' / 'iter_10.pth').exists()
