"""Ordinary mistakes: one line each that says what, where and what to do."""

import re
from importlib import import_module, metadata
from importlib.util import find_spec

import pytest
import torch
from torch import nn

import mmdevplug
from mmdevplug import DeviceDistributedDataParallel, init_device
from mmdevplug.accelerators.detection import is_missing
from mmdevplug.checks.config_errors import explain_config
from mmdevplug.cli import main as command, test, train
from mmdevplug.errors import ModelError
from mmdevplug.model.move import check_materialized
from mmdevplug.utils.broken_imports import distribution
from tests.cli.running import (
    DIGITS,
    call,
    config,
    mmdevplug as in_a_process,
    only_line,
    only_message,
)
from tests.commands import CLI, run
from tests.ranks import in_ranks


def test_a_checkpoint_that_is_not_there(tmp_path):
    for found in (
        only_line(train.main, DIGITS, '--resume', 'nope.pth', '--work-dir', tmp_path),
        only_line(test.main, DIGITS, 'nope.pth', '--work-dir', tmp_path),
    ):
        assert "'nope.pth' can not be found" in found
        assert 'Correct the path' in found
    assert "CHECKPOINT 'nope.pth' can not be found" in found  # the last one


def test_amp_without_an_optimizer(tmp_path):
    path = config(tmp_path, 'optim_wrapper = None')
    found = only_line(train.main, path, '--amp', '--work-dir', tmp_path)
    assert f"'{path}' has no optim_wrapper; expected model, train_dataloader" in found


def test_an_empty_config(tmp_path):
    path = tmp_path / 'empty.py'
    path.write_text('')
    for found in (only_line(train.main, path), only_line(test.main, path, 'x.pth')):
        assert 'has no model, t' in found
        assert '_base_' in found


def test_a_model_without_a_type(tmp_path):
    path = config(tmp_path, 'model = dict(_delete_=True, width=3)')
    found = only_line(train.main, path, '--work-dir', tmp_path)
    assert found.endswith('or inherit the rest of it with _base_.')
    assert f"CONFIG '{path}': model has no type; expected model=dict(type=..., ...)" in found
    path = config(tmp_path, 'optim_wrapper = dict(optimizer=dict(_delete_=True, lr=0.1))')
    assert 'optim_wrapper.optimizer has no type. Add it: dict(type=..., ' in only_line(
        train.main, path, '--work-dir', tmp_path
    )


@pytest.mark.parametrize(
    ('lines', 'key', 'registry', 'meant'),
    [
        ("model = dict(type='DigitsClasifier')", 'model.type', 'model', 'DigitsClassifier'),
        (
            "model = dict(init_cfg=[dict(type='Kaimin', layer='Conv2d')])",
            'model.init_cfg.0.type', 'weight initializer', 'Kaiming',
        ),
        (
            "train_dataloader = dict(dataset=dict(type='DigitDataset'))",
            'train_dataloader.dataset.type', 'dataset', 'DigitsDataset',
        ),
        ("custom_hooks = [dict(type='EMAHok')]", 'custom_hooks.0.type', 'hook', 'EMAHook'),
        (
            "optim_wrapper = dict(optimizer=dict(type='SGDD'))",
            'optim_wrapper.optimizer.type', 'optimizer', 'SGD',
        ),
        (
            "param_scheduler = dict(type='CosineAnnealing')",
            'param_scheduler.type', 'parameter scheduler', 'CosineAnnealingLR',
        ),
    ],
)  # fmt: skip
def test_a_class_that_there_is_not(tmp_path, lines, key, registry, meant):
    found = only_line(train.main, config(tmp_path, lines), '--work-dir', tmp_path)
    assert re.search(rf"DevPlugError: {re.escape(key)}='\w+': no class of this name is ", found)
    assert f"registered as '{registry}' of mmengine; did you mean '{meant}'? Correct it" in found


DATA = """
import os
from mmengine.registry import DATASETS
from mmdevplug.examples.digits import DigitsDataset

@DATASETS.register_module(force=True)
class FolderOfDigits(DigitsDataset):
    def __init__(self, data_root, data_prefix, ann_file='', **options):
        super().__init__(**options)
        os.listdir(os.path.join(data_root, data_prefix['img']))
        open(os.path.join(data_root, ann_file)).close()
"""


@pytest.mark.parametrize(
    ('img', 'key'), [('img/train', "data_prefix.img='img/train'"), ('', "ann_file='list.txt'")]
)
def test_data_that_is_not_there(tmp_path, monkeypatch, img, key):
    (tmp_path / 'folder_of_digits.py').write_text(DATA)
    monkeypatch.syspath_prepend(str(tmp_path))
    root = 'nowhere' if img else str(tmp_path)
    data = dict(type='FolderOfDigits', data_root=root, data_prefix=dict(img=img))
    lines = [
        "custom_imports = dict(imports=['folder_of_digits'])",
        f"train_dataloader = dict(dataset=dict(**{data!r}, ann_file='list.txt'))",
        f"val_dataloader = dict(dataset=dict(**{data!r}, ann_file='others.txt'))",
    ]
    found = only_line(
        train.main, config(tmp_path, '\n'.join(lines)), '--work-dir', tmp_path / 'out'
    )
    path = f'{root}/{img or "list.txt"}'
    dataset = 'train_dataloader.dataset'
    assert f'DevPlugError: {path!r} is not there. The config says {dataset}.data_root=' in found
    assert f'{dataset}.data_root={root!r} and {dataset}.{key}: correct it' in found


def test_a_file_that_the_config_does_not_name(tmp_path):
    error = FileNotFoundError(2, 'No such file or directory', '/proc/nothing')
    assert explain_config(error) is None


def test_an_accelerator_is_looked_for_before_ranks_start(tmp_path):
    done = in_a_process(tmp_path, 'train', DIGITS, '--accelerator', 'gpu', '--nproc', 64)
    assert "'gpu', which is unknown; did you mean 'cuda'? Known: " in only_message(done)


def test_what_is_missing_for_an_accelerator():
    missing = {name for name in ('auto', 'cpu', 'cuda', 'mps', 'gpu') if is_missing(name)}
    assert missing == {'gpu'}
    for name, package in (('gcu', 'torch_gcu'), ('npu', 'torch_npu'), ('xla', 'torch_xla')):
        assert is_missing(name) == (find_spec(package) is None), name


def test_a_work_directory_that_cannot_be(tmp_path):
    (tmp_path / 'file').write_text('')
    found = only_line(train.main, DIGITS, '--work-dir', tmp_path / 'file' / 'work')
    assert "file/work': Not a directory. Checkpoints and logs are written there" in found


def test_ctrl_c_while_packages_are_imported(monkeypatch, capsys):
    def interrupted(name):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, 'import_module', interrupted)
    assert command.main(['train', DIGITS]) == 130
    assert capsys.readouterr().err == 'mmdevplug: ended by SIGINT.\n'


@pytest.mark.parametrize(
    'option',
    [
        "custom_hooks=[dict(type='X')]",
        "custom_hooks=[dict(type='X', interval=1)]",
        "optim_wrapper={'type': 'X'}",
        'no_value',
        'key=[1,(2]',
    ],
)
def test_an_option_that_cannot_be_read(option):
    status, _, printed = call(train.main, DIGITS, '--cfg-options', 'a=1', option)
    assert status == 2
    assert 'Traceback' not in printed
    last = printed.splitlines()[-1]
    assert f'argument --cfg-options: cannot read {option!r}; expected key=value' in last


def test_options_that_can_be_read():
    parser = train.build_parser()
    name = 'default_hooks.checkpoint.filename_tmpl=epoch_{}.pth'
    words = ['a=1', 'b=[x,2.5]', 'c=[(1,2),[a,b]]', '--cfg-options', 'd.e=False']
    found = parser.parse_args([DIGITS, '--cfg-options', name, *words]).cfg_options
    assert found.pop('default_hooks.checkpoint.filename_tmpl') == 'epoch_{}.pth'
    assert found == {'a': 1, 'b': ['x', 2.5], 'c': [(1, 2), ['a', 'b']], 'd.e': False}


def test_lazy_layers_may_wait_in_a_single_process():
    check_materialized(nn.Sequential(nn.LazyLinear(3)), lazy_allowed=True)
    check_materialized(nn.BatchNorm1d(2))


@in_ranks(2)
def test_what_the_wrapper_refuses():
    init_device('pytorch', 'cpu', timeout=60)
    found = []
    lazy, meta = nn.Sequential(nn.LazyLinear(3)), nn.Sequential(nn.Linear(2, 2)).to('meta')
    for module in (lazy, meta, lambda x: x):
        try:
            DeviceDistributedDataParallel(module)
        except ModelError as error:
            found.append(str(error))
    wrapped = DeviceDistributedDataParallel(nn.Linear(2, 2))
    wrapped(torch.ones(1, 2)).sum().backward()
    lazy, meta, function = found
    assert 'Sequential: 0.weight has no shape yet' in lazy
    assert 'Sequential: 0.weight is on the device meta' in meta
    assert 'of type function; expected an nn.Module' in function


def test_the_version():
    done = run(*CLI, '--version')
    assert done.returncode == 0
    package = distribution('mmengine')
    listed = f'mmdevplug {mmdevplug.__version__} ({package} {metadata.version(package)}, '
    assert done.stdout.startswith(listed)
    assert f'torch {torch.__version__}'.split('+')[0] in done.stdout


def test_a_command_calls_itself_as_it_is_typed(capsys):
    for name in ('train', 'test', 'plan', 'check', 'launch-config'):
        with pytest.raises(SystemExit):
            command.main([name, '--help'])
        assert capsys.readouterr().out.startswith(f'usage: mmdevplug {name} ')


COMMANDS = {
    'train': ['c.py'], 'test': ['c.py', 'x.pth'], 'doctor': [], 'plan': ['c.py'],
    'check': ['c.py'], 'launch-config': [],
}  # fmt: skip


@pytest.mark.parametrize('name', sorted(COMMANDS))
def test_a_misspelt_option_is_one_line(capsys, name):
    parser = import_module(f'mmdevplug.cli.{name.replace("-", "_")}').build_parser()
    option = next(word for word in reversed([*parser._option_string_actions]) if len(word) > 5)
    for words in ([f'{option[:-2]}{option[-1]}', '2'], [f'{option[:-2]}{option[-1]}=2']):
        with pytest.raises(SystemExit) as ended:
            parser.parse_args([*COMMANDS[name], *words])
        assert ended.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f'mmdevplug {name}: no option {option[:-2]}{option[-1]}; did you ')
        assert f'{option!r}?' in line


@pytest.mark.parametrize(
    ('words', 'says'),
    [
        (['c.py', '-nproc', '2'], "no option -nproc; did you mean '--nproc'?"),
        (['c.py', 'd.py'], "'d.py' is one argument too many."),
        ([], 'the following arguments are required: config.'),
        (['c.py', '--nproc'], 'argument --nproc: expected one argument.'),
    ],
)
def test_arguments_that_are_wrong_are_one_line(words, says):
    status, _, printed = call(train.main, *words)
    assert status == 2
    assert printed == f'mmdevplug train: {says} All options: mmdevplug train --help\n'


def test_a_misspelt_command_is_one_line(capsys):
    assert command.main(['trian', 'c.py']) == 2
    assert capsys.readouterr().err == ("mmdevplug: 'trian' is no command; did you mean 'train'?\n")


MODEL = """
from mmengine.registry import MODELS
from mmdevplug.errors import ModelError
from mmdevplug.examples.digits import DigitsClassifier

@MODELS.register_module()
class Mine(DigitsClassifier):
    def forward(self, inputs, labels=None, mode='tensor'):
        raise ModelError('no digits.\\nLook at the data.')
"""


@pytest.mark.long
def test_what_all_ranks_meet_is_told_once(tmp_path):
    (tmp_path / 'mine.py').write_text(MODEL)
    imports = "custom_imports = dict(imports=['mine'], allow_failed_imports=False)\n"
    path = config(tmp_path, f"{imports}model = dict(type='Mine')")
    done = in_a_process(tmp_path, 'train', path, '--nproc', 2)
    assert done.returncode == 1
    assert 'Traceback' not in done.stderr
    assert done.stderr.count('Look at the data.') == 1
    assert done.stderr.count('stops too; see rank') == 1
