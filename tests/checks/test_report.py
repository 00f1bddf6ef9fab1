"""The whole command, its files and its exit statuses."""

import io

from rich.console import Console

from mmdevplug.checks.findings import LEVELS, Finding, exit_status
from mmdevplug.checks.report import print_finding

from .running import doctor, examined

HOSTILE = '<script>alert("x")</script> [red]& \'quoted\''


def test_only_errors_make_the_exit_status():
    assert [exit_status([Finding('a', level, '')]) for level in LEVELS] == [1, 0, 0, 0]


def test_texts_are_printed_as_they_are():
    console = Console(file=io.StringIO(), width=200)
    for level in LEVELS:
        print_finding(Finding('a', level, f'{level} {HOSTILE}', HOSTILE, HOSTILE), console)
    printed = console.file.getvalue()
    for level in LEVELS:
        assert f'{level} {HOSTILE}' in printed
    assert printed.count(f'do: {HOSTILE}') == len(LEVELS)


def test_errors_make_the_exit_status_and_markup_is_not_run(tmp_path):
    path = tmp_path / '[red]<script>.py'
    path.write_text("model = dict(type='Nothing')\n")
    stale = dict(RANK='1', LOCAL_RANK='1', WORLD_SIZE='4', MASTER_ADDR='gone')
    options = ['--config', path, '--accelerator', 'cpu']
    done, report = examined(tmp_path, *options, **stale)
    assert done.returncode == report['exit_status'] == 1
    (error,) = [f for f in report['findings'] if f['section'] == 'config']
    assert 'has no train_dataloader' in error['found'] or 'Nothing' in error['found']
    assert '[red]<script>.py' in done.stdout
    (left,) = [f for f in report['findings'] if 'left over' in f['found']]
    assert f'do: {left["remedy"]}' in done.stdout


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
