"""Base configs over configs of other packages, in both styles; what the runner adds to them."""

import copy
import filecmp
import os
import shutil

import pytest
from mmengine.config import Config, ConfigDict

import mmdevplug
from mmdevplug.config.runner_config import prepare_config
from mmdevplug.errors import DevPlugError
from tests.commands import python
from tests.jobs import PATHS, ROOT

ACCELERATORS = ROOT / 'configs' / '_base_' / 'accelerators'
NAMES = sorted(path.stem for path in ACCELERATORS.glob('*.py') if path.stem != '__init__')
EXPECTED = dict(
    auto=dict(type='auto', backend='auto'),
    cpu=dict(type='cpu', backend='gloo'),
    cuda=dict(type='cuda'),
    cuda_gloo=dict(type='cuda', backend='gloo'),
    gcu=dict(type='gcu', backend='auto'),
    xla=dict(type='xla', backend='gloo'),
)

#: What a config of OpenMMLab's other packages has that an accelerator could be in the way of.
MODEL_CONFIG = """
default_scope = 'mmengine'
custom_imports = dict(imports=['mmengine.dist'], allow_failed_imports=False)
env_cfg = dict(
    cudnn_benchmark=True,
    mp_cfg=dict(mp_start_method='fork', opencv_num_threads=0),
    dist_cfg=dict(backend='nccl'),
)
model_wrapper_cfg = dict(type='MMDistributedDataParallel', find_unused_parameters=True)
default_hooks = dict(
    timer=dict(type='IterTimerHook'),
    logger=dict(type='LoggerHook', interval=50),
    checkpoint=dict(type='CheckpointHook', interval=1),
    sampler_seed=dict(type='DistSamplerSeedHook'),
)
custom_hooks = [dict(type='EMAHook'), dict(type='SyncBuffersHook')]
vis_backends = [dict(type='LocalVisBackend')]
visualizer = dict(type='Visualizer', vis_backends=vis_backends, name='visualizer')
log_processor = dict(type='LogProcessor', window_size=50, by_epoch=True)
log_level = 'INFO'
load_from = None
resume = False
launcher = 'none'
randomness = dict(seed=0)
model = dict(type='ToyModel', head=dict(num_classes=80))
optim_wrapper = dict(type='OptimWrapper', optimizer=dict(type='SGD', lr=0.01))
"""


@pytest.fixture
def model_config(tmp_path):
    path = tmp_path / 'model.py'
    path.write_text(MODEL_CONFIG)
    return path


def write(path, *lines):
    path.write_text('\n'.join([*lines, '']))
    return str(path)


def run(code, cwd):
    """Run code in a process that has not imported MMEngine."""
    env = {**os.environ, 'PYTHONPATH': PATHS}
    done = python('-c', code, cwd=cwd, env=env, mmengine=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# the base configs ----------------------------------------------------------------------------


def test_every_base_config_has_its_expectation_here():
    assert sorted(EXPECTED) == NAMES


@pytest.mark.parametrize('name', NAMES)
def test_base_config_has_its_two_keys_and_no_other(name):
    cfg = Config.fromfile(mmdevplug.base_config(name))
    assert cfg.to_dict() == dict(runner_type='DeviceRunner', accelerator=EXPECTED[name])


@pytest.mark.parametrize('name', NAMES)
def test_base_config_alone_imports_the_package(name, tmp_path):
    code = f"""
import sys
from mmengine.config import Config
assert 'mmdevplug' not in sys.modules
cfg = Config.fromfile({str(ACCELERATORS / name)!r} + '.py')
print('mmdevplug' in sys.modules, cfg.runner_type)
"""
    assert run(code, tmp_path) == 'True DeviceRunner'


def test_base_config_alone_makes_the_runner_known(tmp_path):
    code = f"""
from mmengine.config import Config
from mmengine.registry import RUNNERS
cfg = Config.fromfile({mmdevplug.base_config('cpu')!r})
print(RUNNERS.get(cfg.runner_type).__module__)
"""
    assert run(code, tmp_path).startswith('mmdevplug.runner')


def test_base_config_is_an_absolute_path_to_a_file():
    path = mmdevplug.base_config()
    assert os.path.isabs(path)
    # In an sdist the two are copies.
    assert filecmp.cmp(path, ACCELERATORS / 'auto.py', shallow=False)


@pytest.mark.parametrize('name', ['nope', '', 'CPU ', 'cpu.py', '__init__'])
def test_unknown_base_config_is_refused_with_those_there_are(name):
    with pytest.raises(DevPlugError) as caught:
        mmdevplug.base_config(name)
    message = str(caught.value)
    assert message.startswith(f'base_config({name!r})')
    assert ', '.join(NAMES) in message


# old style -----------------------------------------------------------------------------------


@pytest.mark.parametrize('first', ['model', 'accelerator'])
@pytest.mark.parametrize('name', NAMES)
def test_old_style_config_inherits_a_model_and_an_accelerator(model_config, name, first):
    bases = ["'./model.py'", f"__import__('mmdevplug').base_config({name!r})"]
    if first == 'accelerator':
        bases.reverse()
    path = write(
        model_config.with_name('both.py'), f'_base_ = [{", ".join(bases)}]', "work_dir = 'out'"
    )
    merged = Config.fromfile(path)
    expected = Config.fromfile(str(model_config)).to_dict()
    expected.update(runner_type='DeviceRunner', accelerator=EXPECTED[name], work_dir='out')
    assert merged.to_dict() == expected


def test_old_style_config_may_name_the_file(model_config):
    shutil.copytree(str(ROOT / 'configs'), str(model_config.with_name('configs')))
    path = write(
        model_config.with_name('both.py'),
        "_base_ = ['./model.py', './configs/_base_/accelerators/cpu.py']",
    )
    assert Config.fromfile(path).accelerator == EXPECTED['cpu']


def test_old_style_config_may_change_the_accelerator(model_config):
    path = write(
        model_config.with_name('both.py'),
        "_base_ = ['./model.py', __import__('mmdevplug').base_config('auto')]",
        "accelerator = dict(type='npu', backend='hccl')",
        "env_cfg = dict(dist_cfg=dict(backend='gloo'))",
    )
    cfg = Config.fromfile(path)
    assert cfg.accelerator == dict(type='npu', backend='hccl')
    assert cfg.env_cfg.dist_cfg.backend == 'gloo'
    assert cfg.env_cfg.cudnn_benchmark is True


def test_option_on_the_command_line_reaches_the_accelerator(model_config):
    path = write(
        model_config.with_name('both.py'),
        "_base_ = ['./model.py', __import__('mmdevplug').base_config('gcu')]",
    )
    cfg = Config.fromfile(path)
    cfg.merge_from_dict({'accelerator.generation': 't20'})
    assert cfg.accelerator == dict(type='gcu', backend='auto', generation='t20')


@pytest.mark.parametrize('suffix', ['py', 'json', 'yaml'])
def test_flattened_dump_loads_again(model_config, suffix):
    path = write(
        model_config.with_name('both.py'),
        "_base_ = ['./model.py', __import__('mmdevplug').base_config('gcu')]",
    )
    cfg = Config.fromfile(path)
    dumped = model_config.with_name(f'dump.{suffix}')
    cfg.dump(str(dumped))
    again = Config.fromfile(str(dumped))
    assert again.to_dict() == cfg.to_dict()
    assert 'base_config' not in dumped.read_text()


def test_prepared_dump_makes_the_runner_known_by_itself(model_config, tmp_path):
    path = write(
        model_config.with_name('both.py'),
        "_base_ = ['./model.py', __import__('mmdevplug').base_config('cpu')]",
    )
    prepare_config(Config.fromfile(path)).dump(str(tmp_path / 'dump.py'))
    code = """
from mmengine.config import Config
from mmengine.registry import RUNNERS
cfg = Config.fromfile('dump.py')
print(RUNNERS.get(cfg.runner_type).__name__, cfg.accelerator.type)
"""
    assert run(code, tmp_path) == 'DeviceRunner cpu'


# new style -----------------------------------------------------------------------------------

NEW_MODEL_CONFIG = """
from mmengine.hooks import EMAHook
from mmengine.optim import OptimWrapper
from torch.optim import SGD

env_cfg = dict(dist_cfg=dict(backend='nccl'))
custom_imports = dict(imports=['mmengine.dist'], allow_failed_imports=False)
custom_hooks = [dict(type=EMAHook)]
optim_wrapper = dict(type=OptimWrapper, optimizer=dict(type=SGD, lr=0.01))
"""
LOAD_NEW = """
import sys
from mmengine.config import Config
cfg = Config.fromfile('new.py')
assert 'mmdevplug' in sys.modules
assert cfg.runner_type == 'DeviceRunner'
assert cfg.env_cfg.dist_cfg.backend == 'nccl', cfg.env_cfg
assert cfg.custom_hooks[0].type.__name__ == 'EMAHook'
from mmdevplug.config.runner_config import prepare_config
from tests.commands import python
from tests.jobs import PATHS, ROOT
prepared = prepare_config(cfg)
assert prepared.custom_imports['imports'] == ['mmengine.dist', 'mmdevplug.autopatch']
assert cfg.custom_imports['imports'] == ['mmengine.dist']
prepared.dump('dump.py')
again = Config.fromfile('dump.py')
assert again.accelerator == cfg.accelerator and again.runner_type == cfg.runner_type
print(cfg.accelerator.type, cfg.accelerator.get('backend'))
"""


def new_style(folder, *imports):
    write(folder / 'new_model.py', NEW_MODEL_CONFIG)
    write(
        folder / 'new.py',
        'from mmengine.config import read_base',
        '',
        'with read_base():',
        *[f'    {line}' for line in imports],
    )


@pytest.mark.parametrize('name', NAMES)
def test_new_style_config_imports_from_the_package(tmp_path, name):
    new_style(
        tmp_path,
        'from .new_model import *',
        f'from mmdevplug.configs._base_.accelerators.{name} import *',
    )
    backend = EXPECTED[name].get('backend')
    assert run(LOAD_NEW, tmp_path) == f'{EXPECTED[name]["type"]} {backend}'


def test_new_style_config_imports_relatively(tmp_path):
    shutil.copytree(str(ROOT / 'configs'), str(tmp_path / 'configs'))
    folder = tmp_path / 'configs' / 'mine'
    folder.mkdir()
    new_style(folder, 'from .._base_.accelerators.gcu import *', 'from .new_model import *')
    assert run(LOAD_NEW, folder) == 'gcu auto'


def test_new_style_config_may_change_the_accelerator(tmp_path):
    new_style(
        tmp_path,
        'from .new_model import *',
        'from mmdevplug.configs._base_.accelerators.gcu import *',
    )
    with open(str(tmp_path / 'new.py'), 'a') as file:
        file.write("accelerator.update(generation='s60')\n")
    code = "from mmengine.config import Config; print(Config.fromfile('new.py').accelerator)"
    assert run(code, tmp_path) == str(dict(type='gcu', backend='auto', generation='s60'))


# the examples --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('name', 'accelerator'),
    [('digits', None), ('digits_cpu', 'cpu'), ('digits_gcu_t20_8x', 'gcu'), ('digits_xla', 'xla')],
)
def test_digits_config_names_its_accelerator(name, accelerator):
    cfg = Config.fromfile(str(ROOT / 'configs' / 'digits' / f'{name}.py'))
    assert cfg.get('accelerator', {}).get('type') == accelerator
    assert cfg.get('runner_type') == (None if accelerator is None else 'DeviceRunner')
    assert cfg.model.type == 'DigitsClassifier'
    plain = Config.fromfile(str(ROOT / 'configs' / 'digits' / 'digits.py'))
    assert cfg.optim_wrapper == plain.optim_wrapper
    assert cfg.train_dataloader.dataset == plain.train_dataloader.dataset


def test_digits_on_eight_cards_has_the_batch_of_two_processes():
    cfg = Config.fromfile(str(ROOT / 'configs' / 'digits' / 'digits_gcu_t20_8x.py'))
    assert cfg.train_dataloader.batch_size * 8 == cfg.auto_scale_lr.base_batch_size
    plain = Config.fromfile(str(ROOT / 'configs' / 'digits' / 'digits.py'))
    assert plain.train_dataloader.batch_size * 2 == plain.auto_scale_lr.base_batch_size


# what the runner adds ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('before', 'imports'),
    [
        (None, ['mmdevplug.autopatch']),
        ({}, ['mmdevplug.autopatch']),
        (dict(imports=None), ['mmdevplug.autopatch']),
        (dict(imports=[]), ['mmdevplug.autopatch']),
        (dict(imports='mmdet.models'), ['mmdet.models', 'mmdevplug.autopatch']),
        (dict(imports=['a', 'b.c']), ['a', 'b.c', 'mmdevplug.autopatch']),
        (dict(imports=('a', 'b.c')), ['a', 'b.c', 'mmdevplug.autopatch']),
        (dict(imports=['mmdevplug', 'a']), ['mmdevplug', 'a']),
        (dict(imports='mmdevplug'), ['mmdevplug']),
        (dict(imports=['mmdevplug.autopatch']), ['mmdevplug.autopatch']),
        (dict(imports='mmdevplug.autopatch'), ['mmdevplug.autopatch']),
        (dict(imports=['mmdevplug_extras']), ['mmdevplug_extras', 'mmdevplug.autopatch']),
    ],
)
@pytest.mark.parametrize('form', [dict, ConfigDict, Config])
def test_prepared_config_imports_mmdevplug_once(form, before, imports):
    cfg = form(dict(work_dir='out', env_cfg=dict(dist_cfg=dict(backend='nccl'))))
    if before is not None:
        cfg['custom_imports'] = copy.deepcopy(before)
    prepared = prepare_config(cfg)
    assert type(prepared) is form
    assert list(prepared['custom_imports']['imports']) == imports
    assert prepared['work_dir'] == 'out'
    assert prepared['env_cfg'] == dict(dist_cfg=dict(backend='nccl'))
    # The argument is left as it was.
    assert cfg.get('custom_imports') == before
    assert cfg['work_dir'] == 'out'


@pytest.mark.parametrize('allowed', [True, False])
def test_prepared_config_keeps_what_is_said_of_failed_imports(allowed):
    cfg = dict(custom_imports=dict(imports=['a'], allow_failed_imports=allowed))
    assert prepare_config(cfg)['custom_imports']['allow_failed_imports'] is allowed


def test_prepared_config_does_not_allow_its_own_import_to_fail():
    assert prepare_config({})['custom_imports'] == dict(
        imports=['mmdevplug.autopatch'], allow_failed_imports=False
    )


@pytest.mark.parametrize('cfg', [{}, dict(env_cfg=None)])
def test_prepared_config_without_env_cfg_asks_for_no_backend(cfg):
    before = copy.deepcopy(cfg)
    assert prepare_config(cfg)['env_cfg'] == {}
    assert cfg == before


def test_changes_of_the_prepared_config_do_not_reach_the_argument():
    cfg = Config(dict(model=dict(type='ToyModel', head=dict(num_classes=80))))
    prepared = prepare_config(cfg)
    prepared.model.head.num_classes = 3
    assert cfg.model.head.num_classes == 80


def test_preparing_twice_changes_nothing_more():
    once = prepare_config(Config(dict(custom_imports=dict(imports=['a']))))
    assert prepare_config(once).to_dict() == once.to_dict()
