"""The accelerator of docs/*/add_an_accelerator.md trains as the CPU does."""

import os
import re
import subprocess
import sys

import pytest
from mmengine.config import Config
from mmengine.registry import RUNNERS

import mmdevplug
from tests.jobs import PATHS, ROOT, largest_difference, load_file, weights_of
from tests.needs_card import needs_card
from tests.ranks import run_ranks

EXAMPLES = ROOT / 'docs' / 'examples'
STANDINS = [ROOT / 'tests' / 'standins' / name for name in ('acme', 'fakecard')]
#: Without batch normalization, so that only the device differs.
SHORT = ['model.norm=False', 'train_cfg.max_epochs=2', 'train_cfg.val_interval=2']


def train(nproc, work_dir):
    """The command of the page, in a process that has nothing imported."""
    paths = os.pathsep.join([str(EXAMPLES), *map(str, STANDINS), PATHS])
    return subprocess.run(
        [
            *(sys.executable, '-m', 'mmdevplug.cli.main', 'train'),
            *('docs/examples/digits_acme.py', '--nproc', str(nproc), '--work-dir', str(work_dir)),
            *('--cfg-options', *SHORT, 'default_hooks.checkpoint.interval=2'),
        ],
        env={**os.environ, 'PYTHONPATH': paths, 'OMP_NUM_THREADS': '1'},
        cwd=str(ROOT),
        capture_output=True,
        text=True,
        timeout=240,
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
    for name, told in (('python', '"$@"'), ('mmdevplug', '-m mmdevplug "$@"')):
        script = tmp_path / 'bin' / name
        script.parent.mkdir(exist_ok=True)
        # What the maker's package and ours are installed into.
        script.write_text(
            f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{paths}" exec {sys.executable} {told}\n'
        )
        script.chmod(0o755)
    checkout = tmp_path / 'checkout'
    checkout.mkdir()
    for name in ('configs', 'docs'):
        (checkout / name).symlink_to(ROOT / name)
    blocks = bash_blocks('add_an_accelerator.md')
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
    assert done.stdout.count("accelerator 'acme' (accelerator.type='acme'): device acme:0") >= 2
    accuracy = [float(found) for found in re.findall(r'accuracy: ([0-9.]+)', done.stdout)]
    assert len(accuracy) >= 8
    assert accuracy[-1] >= 97.0
    assert (checkout / 'work_dirs' / 'card' / 'epoch_16.pth').exists()
