"""The accelerator of docs/*/add_an_accelerator.md trains as the CPU does."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from mmengine.config import Config
from mmengine.registry import RUNNERS

import mmdevplug
from mmdevplug.accelerators import detection
from mmdevplug.errors import AcceleratorError
from tests.commands import python
from tests.jobs import PATHS, ROOT, largest_difference, load_file, weights_of
from tests.needs_card import needs_card
from tests.ranks import run_ranks

EXAMPLES = ROOT / 'docs' / 'examples'
STANDINS = [ROOT / 'standins' / name for name in ('acme', 'fakecard')]
#: Without batch normalization, so that only the device differs.
SHORT = ['model.norm=False', 'train_cfg.max_epochs=2', 'train_cfg.val_interval=2']


def environment(folder):
    """For a process that finds the class in a folder, and the maker's package."""
    paths = os.pathsep.join([str(folder), *map(str, STANDINS), PATHS])
    return {**os.environ, 'PYTHONPATH': paths, 'OMP_NUM_THREADS': '1'}


def mmdevplug_command(*arguments, folder=EXAMPLES):
    """A command of the page."""
    return python('-m', 'mmdevplug.cli.main', *arguments, env=environment(folder))


def train(nproc, work_dir):
    """The training of the page."""
    return mmdevplug_command(
        *('train', 'docs/examples/digits_acme.py', '--nproc', nproc, '--work-dir', work_dir),
        *('--cfg-options', *SHORT, 'default_hooks.checkpoint.interval=2'),
    )


@pytest.mark.parametrize('language', ['en', 'zh_cn'])
def test_the_page_shows_the_files_of_the_example(language):
    page = (ROOT / 'docs' / language / 'add_an_accelerator.md').read_text(encoding='utf-8')
    for name in ('my_accelerator.py', 'digits_acme.py', 'digits_card.py'):
        shown = (EXAMPLES / name).read_text(encoding='utf-8')
        if language == 'zh_cn' and name == 'digits_card.py':
            continue  # its comments are translated
        assert f'```python\n{shown}```' in page, name


def train_on_the_cpu(work_dir):
    """The same training without the accelerator."""
    cfg = Config.fromfile(str(ROOT / 'configs' / 'digits' / 'digits.py'))
    cfg.merge_from_dict(Config.fromfile(mmdevplug.base_config('cpu')).to_dict())
    cfg.merge_from_dict({'model.norm': False, 'train_cfg.max_epochs': 2})
    cfg.work_dir, cfg.launcher = str(work_dir), 'pytorch'
    runner = RUNNERS.build(cfg)
    runner.train()
    return weights_of(runner.model.module)


@pytest.mark.long
@needs_card
def test_two_ranks_train_on_two_cards(tmp_path):
    done = train(2, tmp_path)
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed
    assert "accelerator 'acme' (accelerator.type='acme'): device acme:0" in printed
    saved = load_file(str(tmp_path / 'epoch_2.pth'))['state_dict']
    expected, other = run_ranks(train_on_the_cpu, 2, tmp_path / 'cpu')
    assert largest_difference(expected, other) == 0.0
    assert largest_difference(saved, expected) <= 1e-5


@needs_card
def test_more_ranks_than_cards_are_refused(tmp_path):
    done = train(3, tmp_path)
    assert done.returncode != 0
    assert '2 acme device(s)' in done.stderr
    assert 'ACME_VISIBLE_DEVICES is not set' in done.stderr


def bash_blocks(name):
    page = (ROOT / 'docs' / 'en' / name).read_text(encoding='utf-8')
    return re.findall('```bash\n(.*?)```', page, re.DOTALL)


@pytest.mark.long
@needs_card
@pytest.mark.timeout(900)
def test_the_commands_of_the_page(tmp_path):
    """A maker's engineer, with the page alone: from the first command to the check of a class."""
    paths = os.pathsep.join([*map(str, STANDINS), PATHS])
    for name in ('python', 'mmdevplug', 'pytest'):
        told = '"$@"' if name == 'python' else f'-m {name} "$@"'
        script = tmp_path / 'bin' / name
        script.parent.mkdir(exist_ok=True)
        # What the maker's package and ours are installed into.
        script.write_text(
            f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{paths}" exec {sys.executable} {told}\n'
        )
        script.chmod(0o755)
    checkout = tmp_path / 'checkout'
    checkout.mkdir()
    for name in ('configs', 'docs', 'tests', 'pyproject.toml'):
        (checkout / name).symlink_to(ROOT / name)
    blocks = bash_blocks('add_an_accelerator.md')
    # Another test installs the package.
    blocks = [each for each in blocks if 'pip install' not in each]
    assert len(blocks) == 3
    done = subprocess.run(
        ['bash', '-euxc', '\n'.join(blocks)],
        cwd=str(checkout),
        env={
            **{name: value for name, value in os.environ.items() if name != 'PYTHONPATH'},
            'OMP_NUM_THREADS': '1',
            'PATH': f'{tmp_path}/bin{os.pathsep}{os.environ["PATH"]}',
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=850,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert '2 cards' in done.stdout
    assert re.search(r'1[0-2] passed, [12] skipped', done.stdout), done.stdout
    assert done.stdout.count("accelerator 'acme' (accelerator.type='acme'): device acme:0") >= 2
    accuracy = [float(found) for found in re.findall(r'accuracy: ([0-9.]+)', done.stdout)]
    assert len(accuracy) >= 8
    assert accuracy[-1] >= 97.0
    assert (checkout / 'work_dirs' / 'card' / 'epoch_16.pth').exists()


@pytest.mark.parametrize('name', ['my_accelerator.py', 'digits_acme.py', 'pyproject.toml'])
@pytest.mark.parametrize('language', ['en', 'zh_cn'])
def test_the_page_shows_the_files(language, name):
    page = ROOT / 'docs' / language / 'add_an_accelerator.md'
    assert (EXAMPLES / name).read_text() in page.read_text(encoding='utf-8')


# in a package of its own --------------------------------------------------------------------


@pytest.fixture(scope='module')
def installed(tmp_path_factory):
    """Build the package of the page and install it into a folder."""
    source, target = tmp_path_factory.mktemp('source'), tmp_path_factory.mktemp('installed')
    for name in ('my_accelerator.py', 'pyproject.toml'):
        shutil.copy(str(EXAMPLES / name), str(source))
    pip = [sys.executable, '-m', 'pip', '--disable-pip-version-check', 'install', '--quiet']
    options = ['--no-index', '--no-deps', '--no-build-isolation', '--target', str(target)]
    subprocess.run([*pip, *options, str(source)], check=True, timeout=120)
    return target


@needs_card
def test_conformance_knows_an_installed_package_by_its_name(installed):
    command = ['-m', 'pytest', '-q', 'tests/conformance', '--accelerator', 'acme', '-k', 'copies']
    done = python(*command, env=environment(installed), cwd=str(ROOT))
    assert done.returncode == 0, done.stdout
    assert '1 passed' in done.stdout


@needs_card
def test_detection_finds_an_installed_package(installed, tmp_path):
    done = mmdevplug_command('doctor', '--json', tmp_path / 'doctor.json', folder=installed)
    findings = json.loads((tmp_path / 'doctor.json').read_text())['findings']
    assert "training here uses 'acme' (detected: 2 acme device(s))" in [
        finding['found'] for finding in findings
    ], done.stdout


@pytest.fixture
def entry_point(tmp_path, monkeypatch):
    """Let a package have an entry point ``brass``."""

    def use(value, code=''):
        info = tmp_path / 'brass-1.0.dist-info'
        info.mkdir()
        (info / 'METADATA').write_text('Name: brass\nVersion: 1.0\n')
        (info / 'entry_points.txt').write_text(f'[{detection.ENTRY_POINTS}]\nbrass = {value}\n')
        (tmp_path / 'brass_card.py').write_text(code)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, 'brass_card', raising=False)

    yield use
    detection.ACCELERATORS.module_dict.pop('brass', None)


def test_entry_point_of_a_class_that_registers_nothing_itself(entry_point):
    lines = ('from mmdevplug.accelerators import CPUAccelerator', '', '')
    entry_point(
        'brass_card:Brass', '\n'.join([*lines, "class Brass(CPUAccelerator): name = 'brass'"])
    )
    assert 'brass' in detection.registered_names()
    choice = detection.choose_accelerator('brass')
    assert choice.accelerator.name == 'brass'
    assert choice.reason == "accelerator.type='brass'"


@pytest.mark.parametrize(
    ('value', 'code', 'words'),
    [
        ('no_such_module', '', 'brass = no_such_module .* fails with ModuleNotFoundError'),
        ('brass_card', 'raise OSError("no driver")', 'fails with OSError: no driver'),
        ('brass_card', '', "registers no accelerator 'brass'"),
    ],
)
def test_entry_point_that_brings_no_accelerator(entry_point, value, code, words):
    entry_point(value, code)
    with pytest.raises(AcceleratorError, match=words):
        detection.choose_accelerator('brass')
    # Detection warns of it, and finds what is there.
    with pytest.warns(UserWarning, match=words):
        assert 'cpu' in detection.available_accelerators()
