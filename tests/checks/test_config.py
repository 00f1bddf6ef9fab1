"""Configs with mistakes, one at a time."""

import os
import sys
import textwrap
from pathlib import Path

import pytest
from mmengine.config import Config

from mmdevplug.cli import check
from mmdevplug.model_parallel.sizes import state_factor
from tests.cli.running import DIGITS as CONFIG
from tests.jobs import needs_modes
from tests.ranks import run_ranks

from .running import the

DIGITS = f'_base_ = [{CONFIG!r}]\n'


def look(path, options):
    sys.path.insert(0, str(Path(path).parent))
    try:
        return list(check.work(path, options, lambda step: None))
    except Exception as error:  # as where it is isolated
        return [check.section.error(str(error))]


@pytest.fixture
def examine(tmp_path, monkeypatch, forked_checks):
    def call(lines, seconds=120, accelerator='cpu', isolated=False):
        path = tmp_path / 'config.py'
        path.write_text(textwrap.dedent(lines))
        monkeypatch.chdir(tmp_path)
        before = sorted(set(os.listdir(tmp_path)) - {'__pycache__'})
        options = dict(config=str(path), accelerator=accelerator)
        if isolated:
            monkeypatch.syspath_prepend(str(tmp_path))
            findings = list(check.examine(options, seconds))
        else:
            findings = run_ranks(look, 0, str(path), options)[0]
        assert sorted(set(os.listdir(tmp_path)) - {'__pycache__'}) == before
        return findings

    return call


@needs_modes
def test_good_config(examine):
    step, validation = examine(DIGITS, isolated=True)
    assert (step.level, validation.level) == ('ok', 'ok')
    assert 'one training step on cpu' in step.found
    assert validation.found == 'one validation step'


@pytest.mark.parametrize(
    ('lines', 'line', 'told'),
    [
        ('a = 1\nmodel = dict(type=\n', 2, 'cannot be read'),
        ('a = 1\n\nmodel = dict(type=nothing)\n', 3, "name 'nothing' is not defined"),
        ('a = 1\nb = a / 0\n', 2, 'ZeroDivisionError'),
    ],
)
def test_mistakes_are_named_with_file_and_line(examine, tmp_path, lines, line, told):
    found = the(examine(lines), 'error', told)
    assert f'{tmp_path / "config.py"}:{line}' in found.found


@pytest.mark.long
def test_config_that_aborts_or_hangs_is_a_finding(examine, tmp_path):
    (tmp_path / 'aborts.py').write_text('import os; os.abort()')
    (tmp_path / 'hangs.py').write_text('import time; time.sleep(1000)')
    imports = "custom_imports = dict(imports=['{}'])\n"
    assert 'SIGABRT' in the(examine(imports.format('aborts'), isolated=True), 'error').found
    found = the(examine(imports.format('hangs'), seconds=20, isolated=True), 'error').found
    assert 'loading the config gave no answer for 20 s' in found


@pytest.mark.parametrize(
    ('lines', 'told'),
    [
        ("sync_bn = 'exakt'", "sync_bn='exakt'"),
        ("accelerator = dict(pad_to='large')", "accelerator.pad_to='large'"),
        pytest.param('model = dict(channels=-3)', 'negative dimension', marks=needs_modes),
        ('train_dataloader = dict(dataset=dict(indices=0))', 'has 0 samples'),
        ("custom_hooks = [dict(type='EMAHok')]", 'EMAHok is not in the'),
    ],
)
def test_values_that_cannot_be(examine, lines, told):
    the(examine(DIGITS.replace('digits_cpu', 'digits') + lines), 'error', told)


def test_accelerator_that_is_unknown(examine):
    lines = DIGITS.replace('digits_cpu', 'digits') + "accelerator = dict(type='tpuu')\n"
    assert "'tpuu', which is unknown" in the(examine(lines, accelerator=None), 'error').found


@pytest.mark.parametrize(
    ('optimizer', 'factor'),
    [
        (dict(type='SGD', lr=0.1), 0.0),
        (dict(type='SGD', lr=0.1, momentum=0.9), 1.0),
        (dict(type='AdamW', lr=0.1), 2.0),
        (dict(type='Adam', lr=0.1, amsgrad=True), 3.0),
        (dict(type='LBFGS'), None),
    ],
)
def test_state_of_an_optimizer(optimizer, factor):
    found, why_not = state_factor(Config(dict(optimizer=optimizer)).optimizer)
    assert found == factor
    assert ('closure' in why_not) == (factor is None)
