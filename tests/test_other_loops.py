"""Scripts of other loops: they stand on their page, and train on two cards as on the CPU."""

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys

import pytest

from tests.jobs import ROOT, install_card, need_card
from tests.ranks import run_ranks

FOLDER = ROOT / 'docs' / 'examples' / 'other_loops'
SCRIPTS = ('plain_pytorch', 'accelerate_loop', 'trl_grpo', 'peft_trainer', 'lightning_loop')
#: Without MMEngine, as where it is not installed.
WITHOUT = """
import runpy, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] == 'mmengine':
            raise ModuleNotFoundError("No module named 'mmengine'", name='mmengine')
sys.meta_path.insert(0, Absent())
import mmdevplug.accelerators, mmdevplug.samples, mmdevplug.staged
import mmdevplug.distributed.waiting, mmdevplug.environments.launch_variables
sys.argv = ['plain_pytorch.py', 'cpu']
runpy.run_path('plain_pytorch.py', run_name='__main__')
"""


@pytest.mark.parametrize('language', ['en', 'zh_cn'])
def test_the_page_has_the_scripts(language):
    page = (ROOT / 'docs' / language / 'other_loops.md').read_text(encoding='utf-8')
    for name in SCRIPTS:
        assert (FOLDER / f'{name}.py').read_text(encoding='utf-8') in page, name


def run_all(devices, folder):
    """Run all scripts in this process; what each printed."""
    if devices != 'cpu':
        install_card(devices.partition(':')[0])
    sys.path.insert(0, str(FOLDER))
    printed = {}
    for name in SCRIPTS:
        sys.argv = [name, devices]
        with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()) as out:
            runpy.run_path(str(FOLDER / f'{name}.py'), run_name='__main__')
        printed[name] = out.getvalue()
    return printed


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
    """What the scripts printed on the CPU and on two cards."""
    for name in ('trl', 'peft', 'lightning'):
        pytest.importorskip(name, reason="needs the extra 'loops'")
    need_card()
    folder = tmp_path_factory.mktemp('loops')
    return [run_ranks(run_all, 0, devices, folder)[0] for devices in ('cpu', 'zeta:0-1')]


def losses(text):
    (line,) = [line for line in text.splitlines() if line.startswith('losses ')]
    return [float(word) for word in line.split()[1:]]


@pytest.mark.parametrize('name', SCRIPTS)
def test_losses_on_two_cards_are_those_of_the_cpu(runs, name):
    on_cpu, on_cards = (losses(run[name]) for run in runs)
    assert len(on_cpu) >= 3
    assert on_cards == pytest.approx(on_cpu, abs=1e-5)
    assert len(set(on_cpu)) == len(on_cpu)


def test_the_guard_names_what_it_moved_for_grpo(runs):
    report = runs[1]['trl_grpo']
    assert re.search(r'GRPOTrainer\._compute_loss.*: .*coef_1 \* advantages', report)
    for name in set(SCRIPTS) - {'trl_grpo'}:
        assert 'No operation had operands on different devices' in runs[1][name], name


def test_a_loop_needs_no_mmengine(runs):
    done = subprocess.run(
        [sys.executable, '-c', WITHOUT],
        cwd=FOLDER,
        env={**os.environ, 'PYTHONPATH': str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert losses(done.stdout) == losses(runs[0]['plain_pytorch'])
