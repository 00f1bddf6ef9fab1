"""Commands as a user types them, in processes of their own."""

import os

from tests.commands import python
from tests.jobs import PATHS, ROOT

DIGITS = str(ROOT / 'configs' / 'digits' / 'digits_cpu.py')


def mmdevplug(folder, *arguments, **options):
    """A command in a process that finds the packages of a folder first, with options for it."""
    paths = os.pathsep.join([str(folder), PATHS])
    env = dict(os.environ, PYTHONPATH=paths, OMP_NUM_THREADS='1')
    return python('-m', 'mmdevplug.cli.main', *arguments, cwd=folder, env=env, **options)


def config(folder, lines):
    path = folder / 'config.py'
    path.write_text(f'_base_ = [{DIGITS!r}]\n{lines}\n')
    return path


def only_message(done):
    """The only line for the user; no traceback."""
    assert done.returncode == 1, done.stderr
    assert 'Traceback' not in done.stderr, done.stderr
    told = [line for line in done.stderr.splitlines() if line.startswith('mmdevplug: ')]
    assert len(told) == 1, done.stderr
    return told[0]
