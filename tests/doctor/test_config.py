"""Configs with mistakes, one at a time."""

import os
import sys
import textwrap
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from mmengine.config import Config
from mmengine.registry import DATA_SAMPLERS

from mmdevplug.doctor import config as section, config_values
from mmdevplug.doctor.config_names import names_in
from mmdevplug.model_parallel.sizes import state_factor
from tests.jobs import needs_meta_pass
from tests.ranks import run_ranks

from .running import CONFIG, environment, the

DIGITS = f'_base_ = [{CONFIG!r}]\n'


SPARE_HEAD = """
from mmengine.registry import MODELS
from torch import nn
from mmdevplug.examples.digits import DigitsClassifier

@MODELS.register_module()
class WithSpareHead(DigitsClassifier):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.spare = nn.Linear(2, 2)
"""


def look(path, options):
    sys.path.insert(0, str(Path(path).parent))
    return list(section.work(path, options, lambda step: None))


@pytest.fixture
def examine(tmp_path, monkeypatch):
    """The findings of a config with these lines."""

    def call(lines, ranks=1, seconds=120, accelerator='cpu', isolated=False):
        path = tmp_path / 'config.py'
        path.write_text(textwrap.dedent(lines))
        monkeypatch.chdir(tmp_path)
        before = sorted(set(os.listdir(tmp_path)) - {'__pycache__'})
        options = dict(config=str(path), accelerator=accelerator)
        if isolated:
            monkeypatch.setenv('PYTHONPATH', environment(tmp_path)['PYTHONPATH'])
            findings = section.examine(options, ranks, seconds)
        else:
            findings = run_ranks(look, 0, str(path), dict(options, ranks=ranks))[0]
        assert sorted(set(os.listdir(tmp_path)) - {'__pycache__'}) == before
        return findings

    return call


@needs_meta_pass
def test_good_config(examine):
    findings = examine(DIGITS, isolated=True)
    assert {f.level for f in findings} <= {'ok', 'warning'}
    model = the(findings, 'ok', '29,098 parameters')
    # Momentum: one state for each parameter, measured and not looked up.
    assert model.data['state_factor'] == 1.0
    assert model.data['memory_parts']['parameters'] == 29098 * 4
    assert 'activations not counted' in model.found
    assert the(findings, 'ok', 'all types')


@pytest.mark.parametrize(
    ('lines', 'line', 'told'),
    [
        ('a = 1\nmodel = dict(type=\n', 2, 'SyntaxError'),
        ('a = 1\n\nmodel = dict(type=nothing)\n', 3, "name 'nothing' is not defined"),
        ('a = 1\nb = a / 0\n', 2, 'ZeroDivisionError'),
    ],
)
def test_mistakes_are_named_with_file_and_line(examine, tmp_path, lines, line, told):
    found = the(examine(lines), 'error', told)
    assert f'{tmp_path / "config.py"}:{line}' in found.found


def test_mistake_in_a_base_file_names_that_file(examine, tmp_path):
    (tmp_path / 'base.py').write_text('x = 1\ny = undefined_name\n')
    found = the(examine("_base_ = ['./base.py']\n"), 'error', 'undefined_name')
    assert f'{tmp_path / "base.py"}:2' in found.found


@pytest.mark.parametrize(
    ('lines', 'told'),
    [
        ("_base_ = ['./nowhere.py']\n", 'nowhere.py'),
        ("custom_imports = dict(imports=['no_such_module'])\n", 'no_such_module'),
    ],
)
def test_what_a_config_refers_to_and_is_not_there(examine, lines, told):
    assert told in the(examine(lines), 'error').found


@needs_meta_pass
def test_parameters_without_a_gradient_are_named_for_several_ranks(examine, tmp_path):
    (tmp_path / 'spare_head.py').write_text(SPARE_HEAD)
    lines = f"""{DIGITS}
custom_imports = dict(imports=['spare_head', 'mmdevplug.examples.digits'])
model = dict(type='WithSpareHead')
"""
    found = the(examine(lines, ranks=2), 'warning', 'spare.weight, spare.bias')
    assert 'set find_unused_parameters=True' in found.why
    for ranks, more in ((1, ''), (2, 'find_unused_parameters = True\n')):
        assert not any(
            'without a gradient' in each.found for each in examine(lines + more, ranks=ranks)
        )


@pytest.mark.long
def test_config_that_aborts_or_hangs_is_a_finding(examine, tmp_path):
    (tmp_path / 'aborts.py').write_text('import os; os.abort()')
    (tmp_path / 'hangs.py').write_text('import time; time.sleep(1000)')
    imports = "custom_imports = dict(imports=['{}'])\n"
    assert 'SIGABRT' in the(examine(imports.format('aborts'), isolated=True), 'error').found
    found = the(examine(imports.format('hangs'), seconds=20, isolated=True), 'error').found
    assert 'loading the config gave no answer for 20 s' in found


@pytest.mark.parametrize(
    ('lines', 'path', 'close'),
    [
        ("model = dict(type='DigitClassifier')\n", 'model.type', 'DigitsClassifier'),
        (
            "train_dataloader = dict(dataset=dict(type='DigitsDatast'))\n",
            'train_dataloader.dataset.type',
            'DigitsDataset',
        ),
        (
            "train_dataloader = dict(sampler=dict(type='DefaultSampla'))\n",
            'train_dataloader.sampler.type',
            'DefaultSampler',
        ),
        (
            "optim_wrapper = dict(optimizer=dict(type='AdmW', lr=0.1, momentum=0.9))\n",
            'optim_wrapper.optimizer.type',
            'AdamW',
        ),
        ("optim_wrapper = dict(type='OptimWraper')\n", 'optim_wrapper.type', 'OptimWrapper'),
        ("param_scheduler = dict(type='CosineAnnealing')\n", 'param_scheduler.type', 'Cosine'),
        (
            "default_hooks = dict(logger=dict(type='LogerHook'))\n",
            'default_hooks.logger.type',
            'LoggerHook',
        ),
        ("custom_hooks = [dict(type='EMAHok')]\n", 'custom_hooks[0].type', 'EMAHook'),
        ("val_evaluator = dict(type='DigitsAcuracy')\n", 'val_evaluator.type', 'DigitsAccuracy'),
        ("runner_type = 'DeviceRuner'\n", 'runner_type', 'DeviceRunner'),
        (
            "optim_wrapper = dict(constructor='DefaultOptimWrapperConstructr')\n",
            'optim_wrapper.constructor',
            'DefaultOptimWrapperConstructor',
        ),
    ],
)
def test_unknown_types_are_named_with_their_path_and_what_is_close(examine, lines, path, close):
    found = the(examine(DIGITS + lines), 'error', f'{path}=')
    assert found.data['path'] == path
    assert close in found.remedy
    assert 'config.py:2' in found.found


@needs_meta_pass
def test_types_of_the_default_scope_are_found(examine, tmp_path):
    package = tmp_path / 'mmother'
    package.mkdir()
    (package / '__init__.py').write_text('')
    (package / 'registry.py').write_text(
        'from mmengine.registry import MODELS as ROOT, Registry\n'
        "MODELS = Registry('model', parent=ROOT, scope='mmother', locations=['mmother.models'])\n"
    )
    (package / 'models.py').write_text(
        'from mmengine.model import BaseModel\nfrom torch import nn\n'
        'from .registry import MODELS\n\n'
        '@MODELS.register_module()\nclass Tiny(BaseModel):\n'
        '    def __init__(self, width):\n        super().__init__()\n'
        '        self.layer = nn.Linear(width, width, bias=False)\n'
        '    def forward(self, inputs): ...\n'
    )
    lines = "default_scope = 'mmother'\nmodel = dict(type='Tiny', width=8)\n"
    findings = examine(lines)
    assert the(findings, 'ok', '64 parameters')
    assert not [f for f in findings if f.level == 'error']
    found = the(examine("model = dict(type='mmother.Tny', width=8)\n"), 'error', 'model.type')
    assert 'Tiny' in found.remedy


def test_default_scope_that_is_not_installed(examine):
    found = the(examine(DIGITS + "default_scope = 'mmnothing'\n"), 'error', 'default_scope')
    assert 'mmnothing' in found.found
    assert 'import mmnothing' in found.remedy


def test_words_of_a_modules_own_are_no_mistakes():
    cfg = Config(dict(optim_wrapper=dict(type='OptimWrapper', clip_grad=dict(type='value'))))
    assert [named.path for named in names_in(cfg)] == ['optim_wrapper.type']


def test_a_sampler_of_a_model_is_none_of_a_data_loader():
    """mmdet's pick boxes, and are registered elsewhere."""
    boxes = dict(train_cfg=dict(sampler=dict(type='PseudoSampler')))
    loader = dict(sampler=dict(type='DefaultSampler'))
    cfg = Config(dict(model=dict(boxes, type='RetinaNet'), train_dataloader=loader))
    found = {named.path: named.registry for named in names_in(cfg)}
    assert found['model.train_cfg.sampler.type'] is None
    assert found['train_dataloader.sampler.type'] is DATA_SAMPLERS


@pytest.mark.parametrize('written', ['OptimWrapper', ['OptimWrapper']])
def test_optim_wrapper_that_is_no_dict(written):
    assert list(names_in(Config(dict(optim_wrapper=written)))) == []


@pytest.mark.parametrize(
    ('lines', 'told', 'remedy'),
    [
        (
            "model_wrapper_cfg = dict(type='MMDistributedDataParallel', grad_compression='bf61')",
            "grad_compression='bf61'",
            "'none'",
        ),
        (
            "model_wrapper_cfg = dict(type='DistributedDataParallel', hierarchy='yes')",
            "hierarchy='yes'",
            "'auto'",
        ),
        (
            "model_wrapper_cfg = dict(type='DistributedDataParallel', nonfinite_grads='halt')",
            "nonfinite_grads='halt'",
            "'stop'",
        ),
        ("sync_bn = 'exakt'", "sync_bn='exakt'", "'auto'"),
        ("env_cfg = dict(dist_cfg=dict(timeout='long'))", "timeout='long'", '1800'),
        *(
            (f'accelerator = dict({option})', f'accelerator.{option}', 'expected there')
            for option in (
                "pad_to='large'",
                "mmcv_ops='cpu'",
                "on_nan='halt'",
                'compilation_cache=3',
                'compilations=7',
                "memory='all'",
            )
        ),
        (
            "accelerator = dict(type='cpu', backend='nccl')",
            "'nccl' does not work on accelerator 'cpu'",
            "backend='auto'",
        ),
        (
            'train_dataloader = dict(batch_size=64, dataset=dict(indices=10))',
            'the dataset has 10 samples',
            'batch_size = 10',
        ),
        pytest.param(
            'model = dict(channels=-3)',
            'building the model fails',
            'model = dict',
            marks=needs_meta_pass,
        ),
    ],
)
def test_values_that_cannot_be(examine, lines, told, remedy):
    found = the(examine(DIGITS.replace('digits_cpu', 'digits') + lines), 'error', told)
    assert remedy in found.remedy


def test_accelerator_that_is_unknown(examine):
    lines = DIGITS.replace('digits_cpu', 'digits') + "accelerator = dict(type='tpuu')\n"
    assert "'tpuu', which is unknown" in the(examine(lines, accelerator=None), 'error').found


class HalfPrecision:
    dtype = 'torch.bfloat16'

    def autocast(self):
        return nullcontext()

    def grad_scaler(self):
        from mmdevplug.errors import AcceleratorError

        raise AcceleratorError('no gradient scaler')


def test_key_of_mmcv_1_for_precision_is_named(examine):
    found = the(examine(DIGITS + 'fp16 = dict(loss_scale=512.0)\n'), 'warning', 'fp16={')
    assert 'AmpOptimWrapper' in found.remedy


def test_float16_without_a_scaler_is_refused():
    cfg = Config(dict(optim_wrapper=dict(type='AmpOptimWrapper', dtype='float16')))
    (found,) = config_values._precision(cfg, SimpleNamespace(precision=HalfPrecision()))
    assert found.level == 'error'
    assert 'bfloat16' in found.remedy
    cfg.optim_wrapper.dtype = 'bfloat16'
    assert list(config_values._precision(cfg, SimpleNamespace(precision=HalfPrecision()))) == []


@pytest.mark.parametrize(('ranks', 'warned'), [(2, False), (3, True)])
def test_batch_that_the_learning_rate_is_not_for(ranks, warned):
    cfg = Config.fromfile(CONFIG)
    found = [f for f in config_values.examine(cfg, None, ranks) if 'base_batch_size' in f.found]
    assert bool(found) == warned
    assert all('--auto-scale-lr' in f.remedy for f in found)


def test_checkpoints_in_the_middle_of_an_accumulation():
    cfg = Config.fromfile(CONFIG)
    cfg.optim_wrapper.accumulative_counts = 4
    cfg.default_hooks.checkpoint.update(interval=10, by_epoch=False)
    found = the(list(config_values.examine(cfg, None, 1)), 'warning', 'interval=10')
    assert found.remedy == 'default_hooks.checkpoint.interval = 12'


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


@needs_meta_pass
def test_model_larger_than_the_device_is_built_without_memory(examine):
    # 590 GB of parameters: only a build without memory gets there.
    lines = DIGITS + 'model = dict(channels=92000)\n'
    findings = examine(lines)
    found = the(findings, 'error', 'parameters, of which')
    assert found.data['parameters'] > 150e9
    assert 'less memory' in found.why
    assert found.remedy


@needs_meta_pass
def test_model_that_computes_while_it_is_built_is_built_on_the_host(examine, tmp_path):
    (tmp_path / 'droppath.py').write_text(
        'import torch\nfrom mmengine.model import BaseModel\n'
        'from mmengine.registry import MODELS\n\n'
        '@MODELS.register_module()\nclass Dropping(BaseModel):\n'
        '    def __init__(self):\n        super().__init__()\n'
        '        self.rates = [x.item() for x in torch.linspace(0, 0.1, 4)]\n'
        '        self.weight = torch.nn.Parameter(torch.zeros(5))\n'
        '    def forward(self, inputs): ...\n'
    )
    lines = "custom_imports = dict(imports=['droppath'])\nmodel = dict(type='Dropping')\n"
    findings = examine(lines)
    assert the(findings, 'note', 'built on the host')
    assert the(findings, 'ok', '5 parameters')
