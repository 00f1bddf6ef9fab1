"""Which tests run where, and in which environment."""

import gc
import os
from pathlib import Path

import pytest
import torch
from mmengine.registry import DefaultScope

from tests.jobs import WITHOUT_OPERATORS, need_mmcv_operators
from tests.tiers import has_a_branch, leave_to_long, mark_long

#: Files that take longest, by waiting (first) or computing: they come first, since a worker that
#: met one last would go on alone.
LONG = (
    'tests/fault_tolerance/test_network_faults.py',
    'tests/checkpoint/test_survival.py',
    'tests/cli/test_launch_fuzz.py',
    'tests/cli/test_restart.py',
    'tests/test_import.py',
    'tests/fault_tolerance/test_failure.py',
    'tests/features/test_features.py',
    'tests/cli/test_tools.py',
    'tests/repos/test_mmdet.py',
    'tests/repos/test_mmseg.py',
    'tests/optim/test_training.py',
    'tests/xla/test_optim.py',
    'tests/xla/test_gcu_t20.py',
    'tests/xla/test_xla.py',
)


# Processes of tests and workers of pytest-xdist collect garbage seldom, see there.
_QUICK = str(Path(__file__).parents[1] / 'standins' / 'quick')
if _QUICK not in os.environ.get('PYTHONPATH', '').split(os.pathsep):
    _others = os.environ.get('PYTHONPATH')
    os.environ['PYTHONPATH'] = os.pathsep.join([_QUICK, *([_others] if _others else [])])
# Tests run beside each other, and threads of one would wait for those of another.
torch.set_num_threads(1)
# Servers of processes ask for GPUs, as MMEngine does at its import, without initializing CUDA.
os.environ.setdefault('PYTORCH_NVML_BASED_CUDA_CHECK', '1')
# Tests may run in a pod themselves.
os.environ.pop('KUBERNETES_SERVICE_HOST', None)


def pytest_addoption(parser):
    """For ``tests/conformance``, by those who bring a card, and for the gate."""
    parser.addoption('--accelerator', help='what tests/conformance looks at, e.g. cuda, xla, gcu')
    parser.addoption('--card-config', help='a config with custom_imports and accelerator for it')
    parser.addoption(
        '--one-of-each',
        action='store_true',
        help='of tests that take long, run one case of each kind: see tests/tiers.py',
    )
    parser.addoption(
        '--with-branches',
        action='store_true',
        help='run files of tests whose code does something else on PyTorch 1.10',
    )


@pytest.fixture(autouse=True)
def _environment_as_before():
    """Put variables back, such as those that a process group exports."""
    before = dict(os.environ)
    yield
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(autouse=True)
def _scope_as_before():
    """Forget the scopes of runners: a registry builds another repository's classes in theirs."""
    before = dict(DefaultScope._instance_dict)
    yield
    DefaultScope._instance_dict.clear()
    DefaultScope._instance_dict.update(before)


@pytest.fixture(scope='module', autouse=True)
def _no_scope_of_another_file():
    """Forget those of fixtures that live longer than a test, too."""
    DefaultScope._instance_dict.clear()
    yield
    DefaultScope._instance_dict.clear()


@pytest.fixture(scope='session')
def mmcv_operators():
    """For fixtures that need mmcv's compiled operators; tests have the marker ``operators``."""
    need_mmcv_operators()


@pytest.fixture
def hosts():
    """Two hosts, which are network namespaces."""
    from benchmarks.hosts import Hosts
    from tests.on_hosts import need_hosts

    need_hosts()
    with Hosts(2) as made:
        yield made


def pytest_runtest_setup(item):
    """Skip tests that need mmcv's compiled operators where there are none."""
    if item.get_closest_marker('operators'):
        need_mmcv_operators()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """Skip what asked for the stand-in card in another process where PyTorch cannot have it.

    A test that needs mmcv's compiled operators and does not say so by its marker fails: it would
    run in no target.
    """
    report = (yield).get_result()
    if report.skipped and not item.get_closest_marker('operators'):
        if WITHOUT_OPERATORS in str(report.longrepr):
            report.outcome = 'failed'
            report.longrepr = f'{item.nodeid} needs the marker "operators"'
        return
    if not report.failed:
        return
    import card

    if card.MISSING and card.MISSING in str(call.excinfo.value):
        report.outcome = 'skipped'
        report.longrepr = (str(item.path), item.location[1], f'Skipped: {card.MISSING}')


def pytest_ignore_collect(collection_path, config):
    """See ``--with-branches``; nothing is said of folders."""
    if config.getoption('--with-branches') and collection_path.name.startswith('test_'):
        return None if has_a_branch(collection_path) else True
    return None


def pytest_terminal_summary(terminalreporter):
    """Say how many tests were skipped, and which command runs those that need operators."""
    skipped = terminalreporter.stats.get('skipped', [])
    if skipped:
        line = f'{len(skipped)} tests were skipped, for the reasons above.'
        operators = sum(WITHOUT_OPERATORS in str(report.longrepr) for report in skipped)
        if operators:
            command = 'make test-operators MMCV=path/to/mmcv.whl'
            line = f"{line} {operators} need mmcv's compiled operators: {command}"
        terminalreporter.write_line(line)


def pytest_collection_finish():
    """Let no later collection look through what was imported."""
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Without ``-m``, leave out tests for other environments; with it, run what was asked for."""
    unused = mark_long(items)
    for item in items:
        if 'mmcv_operators' in item.fixturenames:
            item.add_marker(pytest.mark.operators)
    if unused and len(items) > 1000:
        raise pytest.UsageError(f'tests/tiers.py names tests that there are not: {unused}')
    if config.getoption('--one-of-each'):
        left = leave_to_long(items)
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in set(left)]
    places = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.nodeid.split('::')[0], len(LONG)))
    if not torch.cuda.is_available():
        reason = 'needs a GPU: torch.cuda.is_available() is False, torch {}'
        for item in items:
            if item.get_closest_marker('cuda'):
                item.add_marker(pytest.mark.skip(reason=reason.format(torch.__version__)))
    if config.getoption('-m'):
        return
    for item in items:
        for marker in ('cuda', 'xla', 't20', 'tpu', 'opencl'):
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=f'run it with pytest -m {marker}'))
