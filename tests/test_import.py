"""What ``import mmdevplug`` does in a fresh process: registers everything, imports little."""

import os
import subprocess
import sys

import pytest

from mmdevplug.accelerators.torch_native import FAMILIES
from tests.commands import python
from tests.jobs import PATHS, ROOT

VENDORS = sorted(
    {'torch_xla', 'torch_gcu', *(f.package.split('.')[0] for f in FAMILIES.values() if f.package)}
)
PARTS = [
    ('RUNNERS', 'DeviceRunner', 'mmdevplug.runner'),
    ('MODEL_WRAPPERS', 'DeviceDistributedDataParallel', 'mmdevplug.gradients'),
    ('HOOKS', 'DeviceHook', 'mmdevplug.hooks'),
    ('OPTIM_WRAPPERS', 'DeviceOptimWrapper', 'mmdevplug.optim'),
    ('OPTIM_WRAPPERS', 'DeviceAmpOptimWrapper', 'mmdevplug.optim'),
]
LOOK_UPS = '\n'.join(
    f'from mmengine.registry import Registry, {registry}\n'
    f'made = Registry("a", parent={registry}, scope="of {name}")\n'
    f'found = made.get({name!r})\n'
    f'assert found is not None, {name!r}\n'
    f'from {module} import {name}\n'
    f'assert found is {name}'
    for registry, name, module in PARTS
)


def run(code, *paths):
    """Run code in a fresh process and give what it printed."""
    done = subprocess.run(
        [sys.executable, '-W', 'error::ImportWarning', '-c', code],
        env={**os.environ, 'PYTHONPATH': os.pathsep.join([*map(str, paths), PATHS])},
        cwd=str(ROOT),
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().split()


def run_with_torch(code):
    """Run code in a process that has imported PyTorch, and nothing of MMEngine's."""
    code = f"import warnings; warnings.simplefilter('error', ImportWarning)\n{code}"
    env = {**os.environ, 'PYTHONPATH': PATHS}
    done = python('-c', code, env=env, mmengine=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


# what is imported ----------------------------------------------------------------------------

NEW_MODULES = """
import os
import sys
import mmengine
before, variables = set(sys.modules), dict(os.environ)
import mmdevplug
assert variables == dict(os.environ)
print(*sorted(set(sys.modules) - before))
"""


@pytest.fixture
def vendors(tmp_path):
    """A folder of all vendors' packages, which end a process that imports one."""
    for package in VENDORS:
        (tmp_path / f'{package}.py').write_text('raise SystemExit("imported too early")')
    return tmp_path


def test_import_brings_little_and_sets_no_variable(vendors):
    found = run(NEW_MODULES, vendors)
    packages = {name.split('.')[0] for name in found}
    assert packages.isdisjoint({'torch', 'torchvision', 'mmcv', *VENDORS})
    assert 'mmdevplug' in found
    assert set(found).isdisjoint(module for _, _, module in PARTS)
    assert not [name for name in found if name.startswith('mmdevplug.accelerators')]


def test_accelerators_bring_no_vendors_package(vendors):
    """MMEngine imports those that it knows with `mmengine.device`, and one may hang."""
    code = 'import mmdevplug.accelerators, mmdevplug.checks.accelerators, sys; print(*sys.modules)'
    found = run(code, vendors)
    assert 'mmdevplug.accelerators' in found
    assert set(found).isdisjoint({'mmengine.device', *VENDORS})


def test_commands_begin_to_start_ranks_without_torch():
    """The process that ranks are forked from imports it, at the same time as the command."""
    modules = {f'mmdevplug.cli.{name}' for name in ('main', 'train', 'test', 'launch')}
    found = {*run(f'import sys, {", ".join(modules)}; print(*sys.modules)')}
    assert modules <= found
    assert 'torch' not in found


def test_import_leaves_stock_classes_alone():
    run_with_torch("""
from mmengine.runner import Runner
from mmengine.model import MMDistributedDataParallel
from mmengine.dist import utils
def state():
    members = [vars(Runner), vars(MMDistributedDataParallel), vars(utils)]
    return [{name: id(value) for name, value in m.items()} for m in members]
before = state()
import mmdevplug
from mmengine.registry import RUNNERS
RUNNERS.get('DeviceRunner')
mmdevplug.DeviceHook, mmdevplug.DeviceDistributedDataParallel, mmdevplug.get_accelerator('cpu')
assert state() == before
assert RUNNERS.get('Runner') is Runner
""")


# look-ups ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    'first',
    [
        '',
        'import torch',
        'import mmengine.runner',
        'import mmengine.runner, mmengine.model, mmengine.hooks',
        "from mmengine.registry import RUNNERS; RUNNERS.get('Runner')",
        "from mmengine.registry import HOOKS; HOOKS.get('IterTimerHook')",
        "from mmengine.registry import MODEL_WRAPPERS; MODEL_WRAPPERS.get('DataParallel')",
    ],
    ids=[
        'nothing',
        'torch',
        'runner',
        'all-parts',
        'runners-asked',
        'hooks-asked',
        'wrappers-asked',
    ],
)
def test_parts_are_found_after_the_import_alone(first):
    start = run_with_torch if first else run
    start(f'{first}\nimport mmdevplug\n{LOOK_UPS}')


@pytest.mark.parametrize(('registry', 'name', 'module'), PARTS)
def test_each_part_is_found_as_the_first_one(registry, name, module):
    code = f"""
import mmdevplug
from mmengine.registry import {registry}
print({registry}.get({name!r}).__module__)
"""
    assert run_with_torch(code)[-1].startswith(module)


def test_parts_are_found_under_the_scope_of_another_package_and_stock_ones_as_before():
    """MMEngine calls `register_all_modules` of a repository whose registries have no locations."""
    run_with_torch("""
from mmengine.registry import (
    HOOKS, MODEL_WRAPPERS, MODELS, RUNNERS, DefaultScope, Registry
)
import mmdevplug
assert Registry('model', parent=MODELS, scope='repo')._locations == []
CHILD = Registry('runner', parent=RUNNERS, scope='mmother')
DefaultScope.get_instance('mmother', scope_name='mmother')
with CHILD.switch_scope_and_registry('mmother') as registry:
    assert registry is CHILD
    assert registry.get('DeviceRunner') is mmdevplug.DeviceRunner
import mmengine.runner, mmengine.model, mmengine.hooks
assert RUNNERS.get('Runner') is mmengine.runner.Runner
assert HOOKS.get('CheckpointHook') is mmengine.hooks.CheckpointHook
wrapper = MODEL_WRAPPERS.get('MMDistributedDataParallel')
assert wrapper is mmengine.model.MMDistributedDataParallel
""")


def test_every_registered_name_is_known_before_its_module_is_imported():
    run_with_torch("""
import importlib, pkgutil
import mmdevplug.gradients, mmdevplug.hooks, mmdevplug.optim, mmdevplug.runner
from mmengine import registry
for room in (mmdevplug.gradients, mmdevplug.hooks, mmdevplug.optim, mmdevplug.runner):
    for module in pkgutil.iter_modules(room.__path__, f'{room.__name__}.'):
        importlib.import_module(module.name)
for name in 'HOOKS MODEL_WRAPPERS OPTIM_WRAPPERS RUNNERS'.split():
    found = getattr(registry, name).module_dict
    ours = {one for one, kind in found.items() if kind.__module__.startswith('mmdevplug.')}
    assert ours and ours <= set(found._locations), (name, ours - set(found._locations))
""")


def test_second_import_registers_nothing_twice():
    run_with_torch(f"""
import importlib, mmdevplug
importlib.reload(mmdevplug)
{LOOK_UPS}
importlib.reload(mmdevplug)
""")


# names ---------------------------------------------------------------------------------------


def test_every_exported_name_is_there_and_no_other():
    run_with_torch("""
import sys
import mmdevplug
missing = [name for name in mmdevplug.__all__ if getattr(mmdevplug, name, None) is None]
assert not missing, missing
from mmdevplug import *
assert get_accelerator('cpu').name == 'cpu'
assert 'cpu' in available_accelerators()
assert DeviceRunner.__name__ == 'DeviceRunner'
for name, module in [
    ('get_accelerator', 'mmdevplug.accelerators'),
    ('available_accelerators', 'mmdevplug.accelerators'),
    ('DeviceHook', 'mmdevplug.hooks'),
    ('DeviceDistributedDataParallel', 'mmdevplug.gradients'),
    ('DeviceRunner', 'mmdevplug.runner'),
]:
    value = getattr(mmdevplug, name)
    assert value is getattr(sys.modules[module], name), name
try:
    mmdevplug.get_acelerator
except AttributeError as error:
    assert str(error) == "module 'mmdevplug' has no attribute 'get_acelerator'"
else:
    raise SystemExit('found')
assert not hasattr(mmdevplug, 'torch')
try:
    from mmdevplug import nothing_of_the_kind
except ImportError:
    pass
else:
    raise SystemExit('imported')
""")
