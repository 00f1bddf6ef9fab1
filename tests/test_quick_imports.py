"""Commands import quickly: what is left out is there when it is used, nothing stays behind."""

import gc
import os
import subprocess
import sys

import pytest

from mmdevplug.utils.quick_imports import quick_imports
from tests.jobs import ROOT

TRANSFORMERS = """
import torch
print('imported')
class Adafactor(torch.optim.SGD):
    pass
"""
BEFORE = """
import builtins, gc, sys
stock = builtins.__import__
from mmdevplug.utils.quick_imports import quick_imports
with quick_imports():
    import mmdevplug.runner
    assert not gc.isenabled()
assert gc.isenabled() and gc.get_freeze_count() > 100_000, gc.get_freeze_count()
assert builtins.__import__ is stock
from mmengine.optim.optimizer.builder import TRANSFORMERS_OPTIMIZERS
from mmengine.registry import OPTIMIZERS, Registry
"""


def run(code, *folders):
    """Run code after a quick import, with transformers from one of some folders if it is there."""
    done = subprocess.run(
        [sys.executable, '-c', BEFORE + code],
        env={**os.environ, 'PYTHONPATH': os.pathsep.join([*map(str, folders), str(ROOT)])},
        cwd=str(ROOT),
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().split()


LOOK_UPS = [
    "OPTIMIZERS.get('Adafactor')",
    "OPTIMIZERS.get('mmengine.Adafactor')",
    "Registry('optimizer', parent=OPTIMIZERS, scope='mmother').get('Adafactor')",
    "OPTIMIZERS.module_dict['Adafactor']",
    "OPTIMIZERS.module_dict.get('Adafactor')",
    "OPTIMIZERS.module_dict.pop('Adafactor')",
    "dict(OPTIMIZERS.module_dict)['Adafactor']",
    "{**OPTIMIZERS.module_dict}['Adafactor']",
    "dict(OPTIMIZERS.module_dict.items())['Adafactor']",
    "[v for v in OPTIMIZERS.module_dict.values() if v.__module__ == 'transformers'][0]",
]


def test_adafactor_is_transformers_own_when_it_is_looked_up(tmp_path):
    (tmp_path / 'transformers.py').write_text(TRANSFORMERS)
    printed = run(
        f"""
import os
assert 'transformers' not in sys.modules
assert TRANSFORMERS_OPTIMIZERS == ['Adafactor']
assert OPTIMIZERS.get('SGD').__name__ == 'SGD' and len(OPTIMIZERS) > 10
for look_up in {LOOK_UPS!r}:
    # Each is the first one of its process.
    child = os.fork()
    if child == 0:
        found = eval(look_up)
        import transformers
        right = found is transformers.Adafactor
        print(right, found, look_up, flush=True)
        os._exit(not right)
    _, status = os.waitpid(child, 0)
    assert status == 0, look_up
""",
        tmp_path,
    )
    assert printed.count('imported') == printed.count('True') == len(LOOK_UPS)


def test_adafactor_is_built_from_a_config_and_taken_once(tmp_path):
    (tmp_path / 'transformers.py').write_text(TRANSFORMERS)
    run(
        """
import torch
from mmengine.optim import build_optim_wrapper
cfg = dict(type='OptimWrapper', optimizer=dict(type='Adafactor', lr=0.5))
optimizer = build_optim_wrapper(torch.nn.Linear(2, 2), cfg).optimizer
import transformers
assert type(optimizer) is transformers.Adafactor and optimizer.defaults['lr'] == 0.5
assert 'Adafactor' in OPTIMIZERS and 'Adafactor' in repr(OPTIMIZERS)
try:
    OPTIMIZERS.register_module(name='Adafactor', module=torch.optim.SGD)
except KeyError as error:
    assert 'transformers' in str(error), error
else:
    raise SystemExit('registered twice')
""",
        tmp_path,
    )


def test_transformers_that_cannot_be_imported_offer_nothing(tmp_path):
    (tmp_path / 'transformers.py').write_text('raise ImportError("broken")')
    run(
        """
assert OPTIMIZERS.get('Adafactor') is None
assert 'Adafactor' not in OPTIMIZERS and TRANSFORMERS_OPTIMIZERS == []
assert 'Adafactor' not in {name for name in OPTIMIZERS.module_dict if name != 'TorchAdafactor'}
""",
        tmp_path,
    )


def test_users_import_of_transformers_is_the_real_one(tmp_path):
    (tmp_path / 'transformers.py').write_text(TRANSFORMERS)
    (tmp_path / 'of_user.py').write_text('from transformers import Adafactor')
    script = """
from mmdevplug.utils.quick_imports import quick_imports
with quick_imports():
    import of_user
    import mmengine.optim
import transformers
from mmengine.registry import OPTIMIZERS
assert of_user.Adafactor is transformers.Adafactor is OPTIMIZERS._module_dict['Adafactor']
assert type(OPTIMIZERS._module_dict) is dict
"""
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, '-c', script], env={**os.environ, 'PYTHONPATH': path}, capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()


def test_an_import_that_fails_leaves_the_collector_on():
    before = gc.get_freeze_count()
    with pytest.raises(ModuleNotFoundError, match='no_such_module'), quick_imports():
        import no_such_module  # noqa: F401
    assert gc.isenabled()
    assert gc.get_freeze_count() <= before  # fewer, if some were freed


def test_a_collector_that_was_off_stays_off():
    gc.disable()
    try:
        with quick_imports():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()
        gc.unfreeze()
