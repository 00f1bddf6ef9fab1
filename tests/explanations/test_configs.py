"""Configs that cannot be read or built: one line each that names the key or the file."""

import textwrap

import pytest
from mmengine.registry import RUNNERS

from mmdevplug.cli import plan, test, train
from mmdevplug.errors import DevPlugError
from tests.jobs import PLAIN, ROOT, digits_config
from tests.ranks import run_ranks

from .running import DIGITS, config, mmdevplug, only_message
from .test_mistakes import only_line

SCRIPT = "from mmengine.runner import Runner\nraise SystemExit('it runs')\n"


def write(folder, name, text):
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return path


@pytest.mark.parametrize(
    ('text', 'says'),
    [
        (
            f"_base_ = ['{DIGITS[:-3]}u.py']",
            "digits_cpuu.py, which is no file; did you mean 'digits_cpu.py'?",
        ),
        ("_base_ = 'nowhere/base.py'", 'nowhere/base.py, which is no file. Correct its _base_.'),
        (
            'from mmengine.config import read_base\nwith read_base():\n    from .nowhere import *',
            'nowhere.py not found!',
        ),
        (f'_base_ = {DIGITS!r}\nlr = unknown', "below.py:2: NameError: name 'unknown' is not def"),
        (f'_base_ = {DIGITS!r}\nmodel = dict(', '. Expected Python; correct that line.'),
        (f"_base_ = {DIGITS!r}\nlr = '{{{{$NOT_SET:}}}}'", '`NOT_SET` cannot be found'),
        (f'_base_ = [{DIGITS!r}, {DIGITS!r}]', 'Duplicate key is not allowed among bases'),
        (
            "custom_imports = dict(imports=['absent_module'], allow_failed_imports=False)",
            "No module named 'absent_module'. Install what is missing for",
        ),
    ],
)
def test_a_config_that_cannot_be_read(tmp_path, text, says):
    below = write(tmp_path, 'below.py', text)
    path = below if 'read_base' in text else write(tmp_path, 'c.py', "_base_ = './below.py'")
    for found in (
        only_line(train.main, path),
        only_line(test.main, path, 'x.pth'),
        only_line(plan.main, path, '--devices', 'cuda:0-1'),
    ):
        assert f'CONFIG {str(path)!r} cannot be read: ' in found
        assert says in found, found
        assert 'below.py' in found or 'custom_imports' in text


@pytest.mark.parametrize(
    'line',
    [
        "if __name__ == '__main__':\n    pass",
        'runner = Runner.from_cfg(dict())',
        'for _ in range(2):\n    loss.backward()',
        'main()',
    ],
)
def test_a_script_is_not_run_in_place_of_a_config(tmp_path, line):
    path = write(tmp_path, 'script.py', f'{SCRIPT}{line}\n')
    for found in (only_line(train.main, path), only_line(test.main, path, 'x.pth')):
        assert f'CONFIG {str(path)!r} is a script, no config: line ' in found
        assert f'python {path}, in several processes torchrun --nproc_per_node N {path}' in found


def test_configs_are_no_scripts():
    from mmdevplug.explanations.configs import refuse_script

    paths = [*ROOT.glob('configs/**/*.py'), *ROOT.glob('mmdevplug/configs/**/*.py')]
    assert len(paths) > 10
    for path in paths:
        refuse_script(str(path))


def test_the_host_alone_has_no_plan():
    for devices in ('cpu:0-1', 'cpu:1', 'meta:0'):
        found = only_line(plan.main, DIGITS, '--devices', devices)
        assert f"device '{devices}': expected TYPE:INDEX or TYPE:FIRST-LAST of an accel" in found
        assert (
            "e.g. 'cuda:0-1', which a plan does not need to be present. The host is one" in found
        )


# keys -------------------------------------------------------------------------------------------

#: What is laid over the config of the example, the key that is named, and what was meant.
KEYS = [
    (dict(train_cfg=dict(max_epoch=2)), 'train_cfg.max_epoch=2', 'max_epochs'),
    (
        dict(train_cfg=dict(_delete_=True, type='IterBasedTrainLoop', max_iter=2)),
        *('train_cfg.max_iter=2', 'max_iters'),
    ),
    (
        dict(optim_wrapper=dict(optimizer=dict(momentun=0.5))),
        *('optim_wrapper.optimizer.momentun=0.5', 'momentum'),
    ),
    (dict(optim_wrapper=dict(clip_grd=1)), 'optim_wrapper.clip_grd=1', 'clip_grad'),
    (dict(param_scheduler=dict(eta_mn=0)), 'param_scheduler.eta_mn=0', 'eta_min'),
    (dict(train_dataloader=dict(num_worker=0)), 'train_dataloader.num_worker=0', 'num_workers'),
    (
        dict(train_dataloader=dict(dataset=dict(indicess=4))),
        *('train_dataloader.dataset.indicess=4', 'indices'),
    ),
    (
        dict(train_dataloader=dict(sampler=dict(shufle=True))),
        *('train_dataloader.sampler.shufle=True', 'shuffle'),
    ),
    (dict(default_hooks=dict(logger=dict(intervl=1))), 'default_hooks.logger.intervl=1', 'interv'),
    (dict(custom_hooks=[dict(type='EMAHook', momentumm=1)]), 'custom_hooks[0].momentumm', 'mome'),
    (dict(model=dict(norms='BN')), "model.norms='BN'", 'norm'),
    (dict(env_cfg=dict(mp_cfg=dict(mp_start='fork'))), 'env_cfg.mp_cfg.mp_start', 'mp_start_me'),
    (dict(model=dict(type='DigitClassifier')), "model.type='DigitClassifier'", 'DigitsClassifier'),
    (
        dict(optim_wrapper=dict(optimizer=dict(type='SDG'))),
        *("optim_wrapper.optimizer.type='SDG'", 'SGD'),
    ),
    (dict(custom_hooks=[dict(type='EMAHok')]), "custom_hooks[0].type='EMAHok'", 'EMAHook'),
]
LACKS = dict(train_cfg=dict(_delete_=True, by_epoch=True))


def refusals(folder, changes):
    """What training says with each of the changes."""
    found = []
    for number, change in enumerate(changes):
        cfg = digits_config('cpu', folder / str(number), **PLAIN)
        cfg.merge_from_dict(change)
        try:
            RUNNERS.build(cfg).train()
        except DevPlugError as error:
            found.append(str(error))
    return found


def test_a_key_that_nothing_takes_is_named_with_the_one_that_was_meant(tmp_path):
    changes = [change for change, _, _ in KEYS] + [LACKS]
    (found,) = run_ranks(refusals, 0, tmp_path, changes)
    assert len(found) == len(changes), found
    for (_, names, meant), said in zip(KEYS, found):
        assert said.startswith(names), said
        assert f'did you mean {meant!r}'[:-1] in said
    assert found[-1].startswith("train_cfg lacks 'max_epochs', which EpochBasedTrainLoop")


def broken(reason):
    """An error of the user's own code, which keeps its traceback."""
    raise TypeError(reason)


def test_errors_of_code_are_not_taken_for_errors_of_the_config():
    from mmdevplug.explanations.arguments import explain_arguments

    with pytest.raises(TypeError), explain_arguments(dict(model=dict(x=1))):
        broken(x=1)
    with pytest.raises(TypeError), explain_arguments(dict(model=dict(x=1))):
        broken('__init__() got an unexpected keyword argument')
    with pytest.raises(KeyError), explain_arguments(dict(model=dict(x=1))):
        {}['x']


# packages ---------------------------------------------------------------------------------------

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
    name = 'mmother 4.9' if where == 'models' else 'mmother'
    commands = [['train', path], ['plan', path, '--devices', 'cuda:0-1']]
    for arguments in commands if where == 'models' else commands[:1]:
        found = only_message(mmdevplug(tmp_path, *arguments, mmengine=False))
        assert f'{name} cannot be imported, so none of its names is known: ' in found
        assert "ImportError: cannot import name 'nothing_of_this_name' from 'transf" in found
        assert '(transformers 4.9 is installed)' in found
        assert "'HRNet'" not in found
    if where == 'models':
        done = mmdevplug(tmp_path, 'doctor', '--config', path, mmengine=False)
        printed = ' '.join(done.stdout.split())
        assert done.returncode == 1
        assert f'{name} cannot be imported, so none of its names is known' in printed
        assert "'HRNet'" not in printed
