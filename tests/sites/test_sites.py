"""MMEngine's assumptions about devices: what it does by itself on each kind, and with ours.

The rows of one kind of device share two processes: ``docs/sites/stock.py`` runs MMEngine alone
there, then ``docs/sites/ours.py`` the package. With ``MMDEVPLUG_RESULTS=<folder>`` what was found
is written there as JSON, of which ``docs/site_table.py`` makes the documentation's table.
"""

import pytest

from docs.sites.checks import OURS, stock_check
from docs.sites.devices import environ_of
from docs.sites.job import run_both
from docs.sites.rows import ROWS
from docs.sites.vendor import run_vendor
from tests.columns import NATIVE, job_of, write_column
from tests.ranks import free_port, run_ranks

ACCELERATORS = ('cpu', 'zeta', NATIVE, 'xla', 'gcu')


def is_tested(row, name):
    """Whether a row is for a kind of device, or MMEngine is right there and a test looks."""
    return name not in row.absent or (name == NATIVE and row.absent[name] == 'served')


def cases():
    """Each row on each kind of device that it is for."""
    for name in ACCELERATORS:
        marks = [pytest.mark.xla] if name in ('xla', 'gcu') else []
        for number, row in ROWS.items():
            if is_tested(row, name):
                yield pytest.param(number, name, marks=marks, id=f'{number}-{name}')


@pytest.fixture(scope='module')
def columns(tmp_path_factory):
    """For a kind of device: what each rank found."""
    found = {}

    def of(name):
        if name not in found:
            try:
                found[name] = _find(name, tmp_path_factory.mktemp(name))
            except Exception as error:
                found[name] = error  # once is enough
        if isinstance(found[name], Exception):
            raise found[name]
        return found[name]

    return of


def _find(name, folder):
    job = job_of(name)
    job['environ'] = {**job.get('environ', {}), **environ_of(name)}
    ports = [free_port() for _ in range(3)]
    ranks = run_ranks(run_both, 2, name, folder, ports, timeout=290, **job)
    if name == 'zeta':
        ports = [free_port() for _ in range(3)]
        for rank, more in zip(ranks, run_ranks(run_vendor, 2, ports)):
            rank['stock'].update(more['stock'])
            rank['ours'].update(more['ours'])
    for rank in ranks:
        rank['stock'][9] = rank['ours'][9]['stock']
        rank['stock'][17] = rank['ours'][17]['stock']
        rank['ours'][17] = rank['ours'][17]['ours']
    write_column(name, lambda: {number: _cell(number, name, ranks) for number in ROWS})
    return ranks


def _cell(number, name, ranks):
    status = ROWS[number].absent.get(name, 'works')
    if not is_tested(ROWS[number], name):
        return dict(status=status)
    if not _holds(OURS[number], 'ours', number, name, ranks):
        status = 'failed'
    as_told = _holds(stock_check(number, name), 'stock', number, name, ranks)
    return dict(status=status, stock_as_expected=as_told, stock=_short(ranks[0]['stock'][number]))


def _holds(check, who, number, name, ranks):
    try:
        for rank, facts in enumerate(ranks):
            check(facts[who][number], name, rank)
    except AssertionError:
        return False
    return True


def _short(facts):
    """An error as one line; anything else as it is, without what is long."""
    if isinstance(facts, dict) and 'error' in facts:
        return f'{facts["error"]}: {facts["message"]}'[:160]
    if isinstance(facts, dict):
        return {key: _short(value) for key, value in facts.items()}
    return facts if not isinstance(facts, list) or len(facts) < 8 else f'{len(facts)} lines'


@pytest.mark.parametrize(('number', 'name'), list(cases()))
def test_mmengine_by_itself(columns, number, name):
    for rank, facts in enumerate(columns(name)):
        stock_check(number, name)(facts['stock'][number], name, rank)


@pytest.mark.parametrize(('number', 'name'), list(cases()))
def test_ours(columns, number, name):
    for rank, facts in enumerate(columns(name)):
        OURS[number](facts['ours'][number], name, rank)


def kinds():
    for name in ACCELERATORS:
        marks = [pytest.mark.xla] if name in ('xla', 'gcu') else []
        yield pytest.param(name, marks=marks)


@pytest.mark.parametrize('name', list(kinds()))
def test_statistics_are_those_of_all_ranks(columns, name):
    one, other = (facts['ours'][24]['mean'] for facts in columns(name))
    assert one == other


@pytest.mark.parametrize('name', list(kinds()))
def test_mmengine_is_as_before_when_it_is_put_back(columns, name):
    before = NATIVE if name == NATIVE else 'cpu'
    assert [facts['restored'] for facts in columns(name)] == [before] * 2
