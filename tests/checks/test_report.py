"""The whole command, its files and its exit statuses."""

import io
import re

import pytest
from rich.console import Console

from mmdevplug.checks.findings import LEVELS, Finding, exit_status
from mmdevplug.checks.report import print_report
from mmdevplug.cli.doctor import SCHEMA, as_dict

from .running import CONFIG, doctor, examined

KEYS = ['section', 'level', 'found', 'why', 'remedy', 'data']
HOSTILE = '<script>alert("x")</script> [red]& \'quoted\''
POINTS = [dict(bytes=1024, seconds=1e-3), dict(bytes=1 << 20, seconds=2e-3)]
RESULTS = dict(
    world_size=2,
    backend=HOSTILE,
    checks=[dict(name=HOSTILE, status='pass', problems=[], points=POINTS)],
)


def test_schema_of_the_json_is_stable():
    findings = [Finding('a', 'error', 'b', 'c', 'd', dict(e=1)), Finding('a', 'ok', 'f')]
    assert as_dict(findings) == dict(
        schema=SCHEMA,
        mmdevplug=as_dict([])['mmdevplug'],
        exit_status=1,
        counts=dict(error=1, warning=0, note=0, ok=1),
        findings=[
            dict(section='a', level='error', found='b', why='c', remedy='d', data=dict(e=1)),
            dict(section='a', level='ok', found='f', why='', remedy='', data={}),
        ],
    )
    assert SCHEMA == 1


def test_only_errors_make_the_exit_status():
    assert [exit_status([Finding('a', level, '')]) for level in LEVELS] == [1, 0, 0, 0]


def test_texts_are_printed_as_they_are_and_the_worst_come_first():
    findings = [
        Finding(HOSTILE, level, f'{level} {HOSTILE}', HOSTILE, HOSTILE)
        for level in reversed(LEVELS)
    ]
    console = Console(file=io.StringIO(), width=200)
    print_report([*findings, Finding('c', 'ok', '', data=RESULTS)], console)
    printed = console.file.getvalue()
    places = [printed.index(f'{level} {HOSTILE}') for level in LEVELS]
    assert places == sorted(places)
    assert printed.count(f'do:  {HOSTILE}') == len(LEVELS)


@pytest.mark.long
def test_everything_at_once(tmp_path):
    """Three processes and a config."""
    done, report = examined(
        tmp_path,
        *('--nproc', 3, '--accelerator', 'cpu', '--config', CONFIG),
        *('--largest-mb', 0.02, '--rounds', 1, '--work-dir', tmp_path / 'work'),
    )
    assert done.returncode == report['exit_status'] == 0, done.stdout
    assert all(list(finding) == KEYS for finding in report['findings'])
    sections = {finding['section'] for finding in report['findings']}
    assert sections == {
        'versions', 'accelerators', 'launch', 'network', 'limits', 'patches', 'config',
        'collectives',
    }  # fmt: skip
    (data,) = [f['data'] for f in report['findings'] if 'checks' in f['data']]
    assert (data['world_size'], data['passed'], data['single_host']) == (3, True, True)
    (listening,) = [f for f in report['findings'] if 'torchrun at 127.0.0.1' in f['found']]
    assert (listening['level'], listening['section']) == ('ok', 'network')
    assert 'gradient averaging' in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ['doctor.json']


def test_errors_make_the_exit_status_and_markup_is_not_run(tmp_path):
    path = tmp_path / '[red]<script>.py'
    path.write_text("model = dict(type='Nothing')\n")
    stale = dict(RANK='1', LOCAL_RANK='1', WORLD_SIZE='4', MASTER_ADDR='gone')
    options = ['--config', path, '--accelerator', 'cpu']
    done, report = examined(tmp_path, *options, **stale)
    assert done.returncode == report['exit_status'] == 1
    (error,) = [f for f in report['findings'] if f['section'] == 'config']
    assert "model.type='Nothing'" in error['found']
    # Wherever the table breaks the line.
    printed = re.sub(r'[│┃\s]', '', done.stdout)
    assert '[red]<script>.py' in printed
    (left,) = [f for f in report['findings'] if 'left over' in f['found']]
    assert f'do:  {left["remedy"]}' in done.stdout


def test_files_that_cannot_be_written_are_refused_before_anything_is_done(tmp_path):
    for path, told in (
        (tmp_path / 'nowhere' / 'x.json', 'cannot be written'),
        (tmp_path, 'is a folder'),
        ('/proc/x.json', 'cannot be written'),
    ):
        done = doctor('--json', path)
        assert done.returncode == 1
        assert f'--json {str(path)!r}' in done.stderr
        assert told in done.stderr
        assert done.stdout == ''
    assert list(tmp_path.iterdir()) == []


def test_impossible_numbers_are_refused():
    for option, value in (('--nproc', 0), ('--nproc', 100000), ('--timeout', -1)):
        done = doctor(option, value)
        assert done.returncode == 1
        assert f'{option} {value}: expected' in done.stderr


@pytest.mark.long
def test_a_job_that_fails_sends_to_the_errors_found_before(tmp_path):
    options = ['--nproc', 2, '--config', CONFIG, '--accelerator', 'cpu', '--timeout', 30]
    done, report = examined(tmp_path, *options, GLOO_SOCKET_IFNAME='nope0')
    assert done.returncode == 1
    interface, job = [f for f in report['findings'] if f['level'] == 'error']
    assert interface['remedy'] == 'unset GLOO_SOCKET_IFNAME'
    assert (job['section'], 'nope0' in job['found']) == ('collectives', True)
    assert job['remedy'].startswith('first what the other errors say')
