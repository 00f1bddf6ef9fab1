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
import sys
import mmengine
before = set(sys.modules)
import mmdevplug
print(*sorted(set(sys.modules) - before))
"""


def test_import_brings_neither_torch_nor_a_vendors_package(tmp_path):
    # Where they are installed they could be imported, so they are.
    for package in VENDORS:
        (tmp_path / f'{package}.py').write_text('raise SystemExit("imported too early")')
    found = {name.split('.')[0] for name in run(NEW_MODULES, tmp_path)}
    assert found.isdisjoint({'torch', 'torchvision', 'mmcv', *VENDORS})


def test_accelerators_bring_no_vendors_package(tmp_path):
    """MMEngine imports those that it knows with `mmengine.device`, and one may hang."""
    for package in VENDORS:
        (tmp_path / f'{package}.py').write_text('raise SystemExit("imported too early")')
    code = 'import mmdevplug.accelerators, mmdevplug.checks.accelerators, sys; print(*sys.modules)'
    found = run(code, tmp_path)
    assert 'mmdevplug.accelerators' in found
    assert set(found).isdisjoint({'mmengine.device', *VENDORS})


@pytest.mark.parametrize('command', ['train', 'test'])
def test_commands_begin_to_start_ranks_without_torch(command):
    """The process that ranks are forked from imports it, at the same time as the command."""
    modules = f'mmdevplug.cli.{command}, mmdevplug.cli.launch'
    found = run(f'import mmdevplug.cli.main, {modules}, sys; print(*sys.modules)')
    assert f'mmdevplug.cli.{command}' in found
    assert 'torch' not in found


def test_import_brings_none_of_the_parts():
    found = run(NEW_MODULES)
    assert 'mmdevplug' in found
    assert set(found).isdisjoint(module for _, _, module in PARTS)
    assert not [name for name in found if name.startswith('mmdevplug.accelerators')]


def test_import_sets_no_environment_variable():
    changed = """
import os
import mmengine
before = dict(os.environ)
import mmdevplug
print(*[name for name in os.environ if os.environ[name] != before.get(name)])
"""
    assert run(changed) == []


def test_import_leaves_stock_classes_alone():
    assert (
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
        == []
    )


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


def test_parts_are_found_under_the_scope_of_another_package():
    run_with_torch("""
from mmengine.registry import RUNNERS, DefaultScope, Registry
import mmdevplug
CHILD = Registry('runner', parent=RUNNERS, scope='mmother')
DefaultScope.get_instance('mmother', scope_name='mmother')
with CHILD.switch_scope_and_registry('mmother') as registry:
    assert registry is CHILD
    assert registry.get('DeviceRunner') is mmdevplug.DeviceRunner
""")


def test_stock_parts_are_still_found():
    run_with_torch("""
import mmdevplug
from mmengine.registry import HOOKS, MODEL_WRAPPERS, RUNNERS
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


def test_registries_without_locations_stay_without():
    """MMEngine then calls `register_all_modules` of their repository."""
    run_with_torch("""
import mmdevplug
from mmengine.registry import MODELS, Registry
assert Registry('model', parent=MODELS, scope='repo')._locations == []
""")


def test_second_import_registers_nothing_twice():
    run_with_torch(f"""
import importlib, mmdevplug
importlib.reload(mmdevplug)
{LOOK_UPS}
importlib.reload(mmdevplug)
""")


# names ---------------------------------------------------------------------------------------


def test_every_exported_name_is_there():
    assert (
        run_with_torch("""
import mmdevplug
missing = [name for name in mmdevplug.__all__ if getattr(mmdevplug, name, None) is None]
assert not missing, missing
from mmdevplug import *
assert get_accelerator('cpu').name == 'cpu'
assert 'cpu' in available_accelerators()
assert DeviceRunner.__name__ == 'DeviceRunner'
""")
        == []
    )


def test_exported_names_are_those_of_their_modules():
    run_with_torch("""
import sys
import mmdevplug
for name, module in [
    ('get_accelerator', 'mmdevplug.accelerators'),
    ('available_accelerators', 'mmdevplug.accelerators'),
    ('DeviceHook', 'mmdevplug.hooks'),
    ('DeviceDistributedDataParallel', 'mmdevplug.gradients'),
    ('DeviceRunner', 'mmdevplug.runner'),
]:
    value = getattr(mmdevplug, name)
    assert value is getattr(sys.modules[module], name), name
""")


def test_unknown_name_is_an_attribute_error():
    run_with_torch("""
import mmdevplug
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
