"""Configs that cannot be read, and packages that cannot be imported: one line each."""

from unittest.mock import Mock

import pytest
from mmengine.registry import RUNNERS

from mmdevplug import base_config
from mmdevplug.cli import plan, test, train
from tests.cli.running import DIGITS, config, mmdevplug, only_line, only_message


def write(folder, name, text):
    path = folder / name
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ('text', 'says'),
    [
        (
            'from mmengine.config import read_base\nwith read_base():\n    from .nowhere import *',
            'nowhere.py not found!',
        ),
        (f'_base_ = {DIGITS!r}\nlr = unknown', "below.py:2: NameError: name 'unknown' is not def"),
        (f'_base_ = {DIGITS!r}\nmodel = dict(', 'SyntaxError: '),
        ("_base_ = 'nowhere/base.py'", 'nowhere/base.py'),
        (f"_base_ = {DIGITS!r}\nlr = '{{{{$NOT_SET:}}}}'", '`NOT_SET` cannot be found'),
        (f'_base_ = [{DIGITS!r}, {DIGITS!r}]', 'Duplicate key is not allowed among bases'),
        (
            f"_base_ = ['own.py', {base_config('cpu')!r}]",
            "leave it out, and write accelerator = dict(type='auto') beside your runner_type",
        ),
        (
            "custom_imports = dict(imports=['absent_module'], allow_failed_imports=False)",
            "No module named 'absent_module'",
        ),
    ],
)
def test_a_config_that_cannot_be_read(tmp_path, text, says):
    write(tmp_path, 'own.py', "runner_type = 'OwnRunner'")
    below = write(tmp_path, 'below.py', text)
    path = below if 'read_base' in text else write(tmp_path, 'c.py', "_base_ = './below.py'")
    for found in (
        only_line(train.main, path),
        only_line(test.main, path, 'x.pth'),
        only_line(plan.main, path, '--devices', 'cuda:0-1'),
    ):
        assert f'CONFIG {str(path)!r} cannot be read: ' in found
        assert says in found, found


def test_what_is_given_wins_over_the_config(tmp_path, monkeypatch):
    built = []
    runner = Mock(work_dir=str(tmp_path), cfg={})
    monkeypatch.setattr(RUNNERS, 'build', lambda cfg: built.append(cfg) or runner)
    # As a run that was resumed has written it.
    text = f'_base_ = {DIGITS!r}\nresume = True\nenv_cfg = dict(dist_cfg=dict(timeout=9))'
    path, weights = str(write(tmp_path, 'c.py', text)), write(tmp_path, 'epoch_1.pth', '')
    train.main([path, '--timeout', '60'])
    test.main([path, str(weights)])
    assert [cfg.env_cfg.dist_cfg.timeout for cfg in built] == [60, 9]
    assert [cfg.resume for cfg in built] == [True, False]
    assert built[1].load_from == str(weights)


def test_the_host_alone_has_no_plan():
    for devices in ('cpu:0-1', 'cpu:1', 'meta:0'):
        found = only_line(plan.main, DIGITS, '--devices', devices)
        assert f"device '{devices}': expected TYPE:INDEX or TYPE:FIRST-LAST of an accel" in found
        assert (
            "e.g. 'cuda:0-1', which a plan does not need to be present. The host is one" in found
        )


REGISTRY = """
from mmengine.registry import MODELS as ROOT, Registry
MODELS = Registry('model', parent=ROOT, scope='mmother', locations=['mmother.models'])
"""
MODELS = """
from mmother.registry import MODELS
@MODELS.register_module()
class HRNet:
    pass
from transformers import nothing_of_this_name
"""


@pytest.mark.parametrize('where', ['models', 'package'])
def test_a_package_whose_import_fails_is_named_and_no_other_type(tmp_path, where):
    for name in ('mmother', 'transformers'):
        (tmp_path / name).mkdir()
    fails = 'from transformers import nothing_of_this_name\n'
    version = "__version__ = '4.9'\n"
    (tmp_path / 'transformers' / '__init__.py').write_text(version)
    (tmp_path / 'mmother' / '__init__.py').write_text(version + fails * (where == 'package'))
    (tmp_path / 'mmother' / 'registry.py').write_text(REGISTRY)
    (tmp_path / 'mmother' / 'models.py').write_text(MODELS)
    lines = "default_scope = 'mmother'\nmodel = dict(_delete_=True, type='HRNett')"
    path = config(tmp_path, lines)
    name = 'mmother 4.9 cannot be imported, so none of its names is known: '
    name = name if where == 'models' else 'mmother/__init__.py:2: '
    commands = [['train', path], ['plan', path, '--devices', 'cuda:0-1']]
    for arguments in commands if where == 'models' else commands[:1]:
        found = only_message(mmdevplug(tmp_path, *arguments, mmengine=False))
        assert name in found
        assert "ImportError: cannot import name 'nothing_of_this_name' from 'transf" in found
        assert "'HRNet'" not in found
    if where == 'models':
        done = mmdevplug(tmp_path, 'doctor', '--config', path, mmengine=False)
        printed = ' '.join(done.stdout.split())
        assert done.returncode == 1
        assert name in printed
        assert "'HRNet'" not in printed
