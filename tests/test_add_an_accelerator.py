"""The accelerator of docs/*/add_an_accelerator.md trains as the CPU does."""

import os
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
    for name in ('my_accelerator.py', 'digits_acme.py'):
        assert f'```python\n{(EXAMPLES / name).read_text(encoding="utf-8")}```' in page, name


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
