"""The whole command, its files and its exit statuses."""

import base64
import re
import struct

import pytest

from mmdevplug.cli.doctor import SCHEMA, as_dict
from mmdevplug.doctor.findings import LEVELS, Finding, exit_status
from mmdevplug.doctor.html_page import render

from .running import CONFIG, doctor, examined

KEYS = ['section', 'level', 'found', 'why', 'remedy', 'data']
HOSTILE = '<script>alert("x")</script> [red]& \'quoted\''
POINTS = [dict(bytes=1024, seconds=1e-3), dict(bytes=1 << 20, seconds=2e-3)]
RESULTS = dict(
    world_size=2,
    backend=HOSTILE,
    checks=[dict(name=HOSTILE, status='pass', problems=[], points=POINTS)],
)
MEMORY = dict(memory_parts={'parameters': 4e6, 'gradients': 4e6}, memory_total=None)


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


def test_page_escapes_all_texts_and_loads_nothing():
    findings = [
        Finding(HOSTILE, level, f'{level} {HOSTILE}', HOSTILE, HOSTILE)
        for level in reversed(LEVELS)
    ]
    findings += [Finding('c', 'ok', '', data=RESULTS), Finding('m', 'ok', '', data=MEMORY)]
    page = render(findings, HOSTILE)
    assert '<script' not in page
    text = re.sub(r'base64,[^"]+', '', page)
    assert not re.search(r'https?:|//[\w.]+/|url\(|@import|<link|<iframe', text)
    assert set(re.findall(r'(?:src|href)="([^"]{0,22})', page)) == {'data:image/png;base64,'}
    assert "default-src 'none'" in page
    places = [page.index(f'{level} &lt;script&gt;') for level in LEVELS]
    assert places == sorted(places)
    assert page.count('do:  &lt;script&gt;') == len(LEVELS)


def test_pictures_are_pictures():
    findings = [Finding('c', 'ok', '', data=RESULTS), Finding('m', 'ok', '', data=MEMORY)]
    pictures = re.findall(r'base64,([^"]+)"', render(findings, ''))
    assert len(pictures) == 2
    for picture in pictures:
        data = base64.b64decode(picture)
        assert data.startswith(b'\x89PNG')
        assert min(struct.unpack('>II', data[16:24])) > 100


@pytest.mark.long
def test_everything_at_once(tmp_path):
    """Three processes, a config, both files."""
    page = tmp_path / 'report.html'
    done, report = examined(
        tmp_path,
        *('--nproc', 3, '--accelerator', 'cpu', '--config', CONFIG, '--html', page),
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
    assert page.read_text().count('data:image/png;base64,') == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ['doctor.json', 'report.html']


def test_errors_make_the_exit_status_and_markup_is_not_run(tmp_path):
    path = tmp_path / '[red]<script>.py'
    path.write_text("model = dict(type='Nothing')\n")
    page = tmp_path / 'report.html'
    stale = dict(RANK='1', LOCAL_RANK='1', WORLD_SIZE='4', MASTER_ADDR='gone')
    options = ['--config', path, '--accelerator', 'cpu', '--html', page]
    done, report = examined(tmp_path, *options, **stale)
    assert done.returncode == report['exit_status'] == 1
    (error,) = [f for f in report['findings'] if f['data'].get('path') == 'model.type']
    assert "model.type='Nothing'" in error['found']
    # Wherever the table breaks the line.
    printed = re.sub(r'[│┃\s]', '', done.stdout)
    assert '[red]<script>.pycanbeloaded' in printed
    assert '<script' not in page.read_text()
    (left,) = [f for f in report['findings'] if 'left over' in f['found']]
    assert f'do:  {left["remedy"]}' in done.stdout


def test_files_that_cannot_be_written_are_refused_before_anything_is_done(tmp_path):
    for option, path, told in (
        ('--json', tmp_path / 'nowhere' / 'x.json', 'cannot be written'),
        ('--html', tmp_path, 'is a folder'),
        ('--json', '/proc/x.json', 'cannot be written'),
    ):
        done = doctor(option, path)
        assert done.returncode == 1
        assert f'{option} {str(path)!r}' in done.stderr
        assert told in done.stderr
        assert 'looking at' not in done.stderr
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
