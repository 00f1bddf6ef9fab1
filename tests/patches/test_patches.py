"""Symbols of other packages: what is replaced is listed, recorded and restored."""

import ast
import importlib
import importlib.util
import os
import sys
import types
from contextlib import suppress

import pytest
import torch
from mmengine.hooks import Hook
from mmengine.logging import logger
from mmengine.registry import HOOKS, DefaultScope, Registry
from mmengine.runner.amp import autocast
from torch import distributed as torch_dist
from torch.utils import checkpoint

from mmdevplug.patches.barrier import restore_barrier
from mmdevplug.patches.mmcv_ops import restore_mmcv_ops
from mmdevplug.patches.mmengine import patch_mmengine, restore_mmengine
from mmdevplug.patches.mmseg import patch_accuracy
from mmdevplug.patches.torch_load import safe_loading
from mmdevplug.utils import patching
from mmdevplug.utils.patching import (
    JOB,
    KEPT,
    OWN,
    active_patches,
    full_name,
    patch_symbol,
    restore_patches,
)
from tests.commands import python
from tests.jobs import ROOT, install_card, torch_before, train_digits
from tests.ranks import in_ranks


def _load_page():
    sys.path.insert(0, str(ROOT / 'docs'))
    place = importlib.util.spec_from_file_location('patch_table', ROOT / 'docs/patch_table.py')
    page = importlib.util.module_from_spec(place)
    place.loader.exec_module(page)
    sys.path.remove(str(ROOT / 'docs'))
    return page


page = _load_page()
PATCHED_SYMBOLS = page.PATCHED_SYMBOLS
PACKAGES = ('mmengine', 'mmcv', 'mmseg', 'torch')
#: What MMEngine and PyTorch change by themselves in a job: the scopes of runners, counters, and
#: the loaders of checkpoints, where ours are registered.
STATE = {
    ('mmengine.runner.checkpoint.CheckpointLoader', '_schemes'),
    ('mmengine.registry.default_scope.DefaultScope', '_instance_dict'),
    ('torch.utils.hooks.RemovableHandle', 'next_id'),
    ('torch.distributed.distributed_c10d', '_group_count'),
    # PyTorch 2.9's own context `safe_globals` puts an equal set back.
    ('torch._weights_only_unpickler', '_marked_safe_globals_set'),
}


def package_of(name):
    return name.split('.')[0]


def snapshot():
    """All attributes of loaded modules of the packages and of their classes."""
    found = {}
    for name, module in list(sys.modules.items()):
        if package_of(name) not in PACKAGES or not isinstance(module, types.ModuleType):
            continue
        for key, value in list(vars(module).items()):
            found[name, key] = value
            # Some old names of PyTorch warn when asked for their class.
            if issubclass(type(value), type) and package_of(value.__module__) in PACKAGES:
                for attribute, held in list(vars(value).items()):
                    found[full_name(value), attribute] = held
    found[full_name(autocast), '__code__'] = autocast.__wrapped__.__code__
    return found


def changed(before, after):
    """Which attributes of a snapshot are others, or gone, in a later one."""
    gone = object()
    return {key for key, value in before.items() if after.get(key, gone) is not value} - STATE


#: What is replaced when a base config is first read, and stays.
ONCE = {symbol.name for symbol in PATCHED_SYMBOLS if symbol.period == page.AUTOPATCH}


def recorded():
    """The active patches that change something: a constant may be what it was."""
    inherited = {
        (patch.owner, patch.name)
        for patch in active_patches()
        if patch.original is patching._INHERITED  # not there before
    }
    return {
        (full_name(patch.owner), patch.name)
        for patch in active_patches()
        if patch.replacement is not patch.original
        and (patch.owner, patch.name) not in inherited
        and patch.name not in ONCE
        and package_of(full_name(patch.owner)) in PACKAGES
    }


def listed_name(patch):
    """How the list names a patch: all operators of mmcv by one entry."""
    return 'mmcv._ext.*' if full_name(patch.owner) == 'mmcv._ext' else str(patch)


def symbols_of(*periods, without=()):
    return {
        str(symbol)
        for symbol in PATCHED_SYMBOLS
        if symbol.period in periods and symbol.name not in without
    }


OF_XLA = {
    symbol.name
    for symbol in PATCHED_SYMBOLS
    if symbol.period == page.JOB and symbol.owner in ('torch', 'torch.nn.functional')
} - {'histc'} | {'contiguous', 'reshape_as'}
INDICES = ('BoolTypeTensor', 'LongTypeTensor', 'IndexType')


def expected_of(accelerator, ranks):
    """The symbols that a job patches by the list."""
    without = (*INDICES, 'is_cuda') if accelerator == 'cpu' else ()
    without = (*without, 'IS_NPU_AVAILABLE')  # an NPU's
    if not hasattr(torch, 'get_autocast_dtype'):  # PyTorch before 2.4
        without = (*without, 'torch', '_cast')
    if accelerator != 'xla':
        without = (*without, 'update_parameters', *OF_XLA)
    periods = [page.JOB, page.LOG_FILES, page.AUTOCAST]
    if accelerator != 'cpu' and hasattr(checkpoint, 'DefaultDeviceType'):  # PyTorch 2.1
        periods.append(page.SEGMENTS)
    found = symbols_of(*periods, without=without)
    if ranks > 1 and accelerator != 'cpu':
        here = [name for name in vars(torch_dist) if name]
        found |= {
            str(symbol)
            for symbol in PATCHED_SYMBOLS
            if symbol.period == page.PROCESS_GROUP and symbol.name in here
        }
        # Only where PyTorch cannot ask for the accelerator: see test_collectives.py.
        found.discard('torch.distributed.barrier')
    if accelerator == 'xla':
        found.add('torch._shape_as_tensor')  # of lazy models; the others are of mmseg
    if importlib.util.find_spec('mmcv._ext') is not None:
        found |= symbols_of(page.MMCV_OPS)
    return found


@pytest.mark.parametrize(
    ('accelerator', 'ranks'),
    [('cpu', 0), ('zeta', 0), ('zeta', 2), pytest.param('xla', 0, marks=pytest.mark.xla)],
)
@in_ranks()
def test_a_job_changes_what_the_list_says_and_all_of_it_is_restored(accelerator, ranks, tmp_path):
    """What jobs in one process change: before, in the middle, at the end, after restoring."""
    with suppress(ImportError):  # mmcv-lite
        import mmcv.ops  # noqa: F401
    install_card(accelerator)
    seen = []

    class SnapshotHook(Hook):
        def before_train_iter(self, runner, batch_idx, data_batch=None):
            if batch_idx == 1:
                seen.append(snapshot())

    HOOKS.register_module(module=SnapshotHook, force=True)

    def train(name):
        hooks = [dict(type='SnapshotHook')]
        train_digits(
            accelerator,
            tmp_path / name,
            custom_hooks=hooks,
            train_cfg__max_epochs=1,
            default_hooks__checkpoint__interval=100,
        )

    def restore():
        restore_mmengine()
        restore_barrier()
        restore_mmcv_ops()

    train('first')  # PyTorch loads many of its parts when they are first used
    restore()
    before = snapshot()
    train('second')
    during = changed(before, seen[-1])
    assert during == changed(before, snapshot()) == recorded()
    listed = {listed_name(patch) for patch in active_patches() if patch.name not in ONCE}
    # PyTorch 1.10 has it elsewhere.
    listed = {each.replace('torch.autocast', 'torch.amp.autocast') for each in listed}
    assert listed == expected_of(accelerator, ranks)
    train('third')  # restores and patches again
    assert changed(before, seen[-1]) == during
    restore()
    assert changed(before, snapshot()) == recorded() == set()


def test_autocast_is_restored_and_patched_anew():
    restore_mmengine()
    original = autocast.__wrapped__.__code__
    for _ in range(2):
        patch_mmengine('cpu')
        assert autocast.__wrapped__.__code__ is not original
        restore_mmengine()
        assert autocast.__wrapped__.__code__ is original


@in_ranks(2)
def test_log_files_have_mmengines_device_without_a_runner():
    install_card('zeta')
    before = logger._get_device_id()
    patch_mmengine('zeta')
    torch_dist.init_process_group('gloo')
    assert before == logger._get_device_id() == torch_dist.get_rank()


SHARED_GPU = """
import torch
from mmengine.registry import RUNNERS
import mmdevplug
torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 1
print(RUNNERS.get('DeviceRunner').__name__)  # the registry logs it
"""


def test_the_second_rank_of_a_gpu_can_look_the_runner_up():
    """MMEngine alone fails with an IndexError where there are fewer GPUs than ranks."""
    done = python('-c', SHARED_GPU, env=dict(os.environ, LOCAL_RANK='1'), mmengine=False)
    assert done.stdout.splitlines()[-1] == 'DeviceRunner', done.stderr[-2000:]


# the helper -------------------------------------------------------------------------------------


@pytest.mark.parametrize('order', [(0, 1), (1, 0)])
def test_patches_of_one_symbol_are_restored_in_any_order(order):
    original = torch.load
    patches = [patch_symbol(torch, 'load', lambda value=value: value) for value in (1, 2)]
    assert active_patches(torch)[-2:] == patches
    for number in order:
        patches[number].restore()
        patches[number].restore()
    assert torch.load is original
    assert not set(patches) & set(active_patches())


def test_no_period_restores_nothing_and_a_period_its_own_patches():
    original = torch.load, sys.excepthook
    patch_symbol(torch, 'load', lambda: 1)
    patch_symbol(sys, 'excepthook', print, KEPT)
    own = patch_symbol(torch, 'save', print, OWN)
    restore_patches()
    assert torch.load is not original[0]
    restore_patches(JOB)
    assert torch.load is original[0]
    assert sys.excepthook is not original[1]
    restore_patches(KEPT)
    assert sys.excepthook is original[1]
    assert own in active_patches(torch)
    own.restore()


def test_a_context_is_recorded_until_it_ends():
    with safe_loading('x'):
        assert 'torch.load' in list(map(str, active_patches()))
    assert 'torch.load' not in list(map(str, active_patches()))


@pytest.mark.operators
def test_accuracy_is_recorded_where_it_was_imported():
    pytest.importorskip('mmseg')
    from mmseg.models.decode_heads import FCNHead

    # A runner of an earlier test in this process may have left its own.
    with DefaultScope.overwrite_default_scope('mmseg'):
        model = FCNHead(in_channels=2, channels=2, num_classes=2)
    assert patch_accuracy(model) == 1
    patched = 'mmseg.models.decode_heads.decode_head.accuracy'
    assert patched in list(map(str, active_patches()))
    restore_mmengine()
    assert patched not in list(map(str, active_patches()))


# the list ---------------------------------------------------------------------------------------

#: Came with later releases than some that are supported, or are gone from the newest.
OPTIONAL = {'all_gather_into_tensor', 'reduce_scatter_tensor', '_cast', '*'}


def sources():
    for path in sorted((ROOT / 'mmdevplug').rglob('*.py')):
        if '.mim' in path.parts:  # copies that an installation has made
            continue
        yield path, ast.parse(path.read_text(encoding='utf-8'))


def with_marks(symbol):
    needs = package_of(symbol.owner) in ('mmcv', 'mmdet', 'mmseg')
    return pytest.param(symbol, marks=pytest.mark.operators if needs else (), id=str(symbol))


@pytest.mark.parametrize('symbol', map(with_marks, PATCHED_SYMBOLS))
def test_what_is_listed_exists(symbol):
    if package_of(symbol.owner) in ('mmcv', 'mmdet', 'mmseg', 'mmagic', 'mmgen', 'mmrazor'):
        pytest.importorskip(package_of(symbol.owner))
    if 'subprocess_handler' in symbol.owner:  # elsewhere before PyTorch 2.3
        pytest.importorskip('torch.distributed.elastic.multiprocessing.subprocess_handler')
    if 'torch.amp' in symbol.owner:  # elsewhere before PyTorch 1.11
        pytest.importorskip('torch.amp')
    if 'DefaultDeviceType' in symbol.owner and torch_before('2.1.0'):
        pytest.skip('PyTorch before 2.1 keeps random states of CUDA alone')
    try:
        owner = importlib.import_module(symbol.owner)
    except ImportError:
        module, _, kind = symbol.owner.rpartition('.')
        owner = getattr(importlib.import_module(module), kind)
    if not isinstance(owner, Registry):  # which has no name of its own
        assert full_name(owner) == symbol.owner
    assert hasattr(owner, symbol.name) or symbol.name in OPTIONAL


def test_every_listed_name_is_patched_somewhere():
    named = set()
    for _, tree in sources():
        for node in ast.walk(tree):
            # Strings, and keywords of a dict.
            found = [getattr(node, key, None) for key in ('value', 'arg')]
            named.update(each for each in found if isinstance(each, str))
    listed = {symbol.name for symbol in PATCHED_SYMBOLS} - {'*'}
    assert {name for name in listed if name not in named} == set()


def test_every_name_that_is_patched_is_listed():
    listed = {symbol.name for symbol in PATCHED_SYMBOLS}
    for path, tree in sources():
        for node in ast.walk(tree):
            called = isinstance(node, ast.Call) and getattr(node.func, 'id', '')
            if called == 'patch_symbol' and isinstance(node.args[1], ast.Constant):
                assert node.args[1].value in listed, f'{path}: add it to docs/patch_table.py'


@pytest.mark.parametrize('language', ['en', 'zh_cn'])
def test_the_page_is_what_the_list_says(language):
    expected = '\n\n'.join(page.render(page.LANGUAGES[language])) + '\n'
    path = ROOT / 'docs' / language / 'patches.md'
    assert path.read_text(encoding='utf-8') == expected, 'run python docs/patch_table.py'


def test_the_translation_has_nothing_that_is_not_listed():
    assert set(page.REASONS) == set(page.REASONS_EN) <= set(map(str, PATCHED_SYMBOLS))
    for periods in (page.PERIODS, page.PERIODS_EN):
        assert set(periods) == {symbol.period for symbol in PATCHED_SYMBOLS}
    owners = [(symbol.owner, symbol.period) for symbol in PATCHED_SYMBOLS]
    explained = [
        (symbol.owner, symbol.period)
        for symbol in PATCHED_SYMBOLS
        if str(symbol) in page.REASONS_EN
    ]
    assert set(owners) == set(explained), 'a symbol without a reason'
