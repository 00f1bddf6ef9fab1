"""The feature table: each row on each kind of device, in 2 ranks, beside one process on the CPU.

With ``MMDEVPLUG_RESULTS=<folder>`` the figures are written there as JSON, one file for each kind
of device.
"""

import os

import pytest

from tests.columns import CUDA, GCU, LAZY, NATIVE, XLA, job_of, within, write_column
from tests.features.rows import ROWS, train_rows
from tests.jobs import largest_difference
from tests.ranks import run_ranks
from tests.t20.conftest import ON_T20

#: A T20 on PyTorch 1.10; ``gcu`` is the same card on torch_xla.
T20 = pytest.param('t20', marks=ON_T20)

ACCELERATORS = [LAZY, 'cpu', 'zeta', NATIVE, CUDA, XLA, GCU, T20]

#: On torch_xla, ``gcu`` differs from ``xla`` in copies, flushes and mixed precision, which these
#: rows meet; ``make test-t20`` trains all rows on the same card. The table wants all of both.
OF_GCU = ['sgd', 'accumulation', 'amp', 'sync_bn', 'anomalous', 'gan', 'collect_results', 'zero']


def is_run(name, accelerator):
    return accelerator != 'gcu' or name in OF_GCU or 'MMDEVPLUG_RESULTS' in os.environ


def cases(names):
    """Rows, each on every accelerator that runs it."""
    for each in ACCELERATORS:
        param = each if hasattr(each, 'marks') else pytest.param(each)
        for name in names:
            if is_run(name, *param.values):
                yield pytest.param(name, *param.values, marks=param.marks)


@pytest.fixture(scope='module')
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp('reference')
    (found,) = run_ranks(train_rows, 0, list(ROWS), 'cpu', folder, True)
    return found


@pytest.fixture(scope='module')
def columns(tmp_path_factory, reference):
    """For an accelerator: what each rank found of each row, trained in one pair of processes."""
    trained = {}

    def of(accelerator):
        if accelerator not in trained:
            names = [
                name
                for name, row in ROWS.items()
                if accelerator not in row.absent_on and is_run(name, accelerator)
            ]
            folder = tmp_path_factory.mktemp(accelerator)
            name = 'gcu' if accelerator == 't20' else accelerator
            job = dict(job_of(name), timeout=280)
            trained[accelerator] = ranks = run_ranks(train_rows, 2, names, name, folder, **job)
            write_column(
                accelerator,
                lambda: {name: _cell(name, accelerator, ranks, reference) for name in ROWS},
            )
        return trained[accelerator]

    return of


def _cell(name, accelerator, ranks, reference):
    row = ROWS[name]
    cell = dict(title=row.title, title_zh=row.title_zh, tolerance=row.tolerance)
    if accelerator in row.absent_on:
        return dict(cell, status='absent')
    found = [rank[name] for rank in ranks]
    if any('error' in one for one in found):
        refused = accelerator in row.refused_on
        return dict(cell, status='refused' if refused else 'failed')
    difference = max(
        largest_difference(one['weights'], reference[name]['weights']) for one in found
    )
    return dict(cell, status='trained', difference=difference)


def rows(condition):
    return [name for name, row in ROWS.items() if condition(row)]


@pytest.mark.parametrize(('name', 'accelerator'), cases(ROWS))
def test_weights_are_those_of_one_process(columns, reference, name, accelerator):
    row = ROWS[name]
    if accelerator in row.absent_on + row.refused_on:
        pytest.skip(f'{row.title} is not for {accelerator}')
    expected = reference[name]
    assert 'error' not in expected, expected
    for found in columns(accelerator):
        assert 'error' not in found[name], found[name]['error']
        difference = largest_difference(found[name]['weights'], expected['weights'])
        assert difference <= within(accelerator, row.tolerance)


@pytest.mark.parametrize(('name', 'accelerator'), cases(rows(lambda row: row.refused_on)))
def test_refused_by_all_ranks(columns, name, accelerator):
    if accelerator not in ROWS[name].refused_on:
        pytest.skip(f'{ROWS[name].title} works on {accelerator}')
    for found in columns(accelerator):
        kind, message = found[name].get('error', (None, 'trained'))
        assert kind == 'ModelError', message
        assert 'ZeroRedundancyOptimizer' in message


@pytest.mark.parametrize('accelerator', ACCELERATORS)
def test_ranks_end_with_equal_weights(columns, accelerator):
    one, other = columns(accelerator)
    for name in one:
        if 'error' not in one[name]:
            assert largest_difference(one[name]['weights'], other[name]['weights']) == 0.0, name


@pytest.mark.parametrize('accelerator', ACCELERATORS)
def test_unused_parameters_are_named(columns, accelerator):
    for found in columns(accelerator):
        told = [text for text in found['anomalous']['told'] if 'computational graph' in text]
        assert any('branches.2.weight' in text for text in told)
        assert not any('head' in text for text in told)


@pytest.mark.parametrize('accelerator', ACCELERATORS)
def test_wrappers(columns, accelerator):
    for found in columns(accelerator):
        assert found['sgd']['wrapper'] == 'DeviceDistributedDataParallel'
        assert found['anomalous']['wrapper'] == 'DeviceDistributedDataParallel'
        assert found['gan']['wrapper'] == 'DeviceSeparateDistributedDataParallel'


def test_rows_train_something_of_their_own(reference):
    """A row that equals plain SGD would show nothing."""
    plain = reference['sgd']['weights']
    same = {
        name
        for name, found in reference.items()
        if found['weights'].keys() == plain.keys()
        and largest_difference(found['weights'], plain) == 0.0
    }
    assert same - {'sgd'} == {
        'activation_checkpointing',
        'checkpoint',
        'checkpoint_reentrant',
        'compile',
        'grad_bf16',
        'zero',
    }


@pytest.mark.parametrize(
    ('name', 'accelerator'), cases([name for name in ROWS if name.startswith('grad_')])
)
def test_gradients_are_compressed(columns, reference, name, accelerator):
    """Equal weights would mean that nothing was."""
    for found in columns(accelerator):
        assert 'error' not in found[name], found[name]['error']
        expected = reference['sgd']['weights']
        assert largest_difference(found[name]['weights'], expected) >= 1e-4


@pytest.mark.parametrize('accelerator', ACCELERATORS)
def test_validations_saw_every_sample(columns, accelerator):
    for found in columns(accelerator):
        weights = found['collect_results']['weights']
        for number in (0, 1):
            for mode in ('cpu', 'gpu'):
                assert weights[f'val{number}/{mode}/samples'] == 101
