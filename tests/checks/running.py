"""Running the doctor as a user does, in a process of its own."""

import json
import os
import subprocess
import sys

from tests.jobs import PATHS, ROOT

STANDIN = str(ROOT / 'standins' / 'fakecard')
CONFIG = str(ROOT / 'configs' / 'digits' / 'digits_cpu.py')
#: Variables of this test run that would be findings of their own.
CLEAN = dict.fromkeys(['RANK', 'WORLD_SIZE', 'MASTER_PORT', 'GLOO_SOCKET_IFNAME'])


def environment(*paths, **environ):
    """Variables for a child; None removes one."""
    variables = {**os.environ, **CLEAN, 'OMP_NUM_THREADS': '1', **environ}
    variables['PYTHONPATH'] = os.pathsep.join([*map(str, paths), PATHS, STANDIN])
    return {name: value for name, value in variables.items() if value is not None}


def doctor(*arguments, paths=(), timeout=280, **environ):
    """``mmdevplug doctor``."""
    return subprocess.run(
        [sys.executable, '-m', 'mmdevplug.cli.main', 'doctor', *map(str, arguments)],
        cwd=ROOT,
        env=environment(*paths, **environ),
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def examined(folder, *arguments, **options):
    """The exit status and the JSON of a run."""
    path = folder / 'doctor.json'
    done = doctor(*arguments, '--json', path, **options)
    assert path.is_file(), done.stderr
    assert 'Traceback' not in done.stderr
    return done, json.loads(path.read_text())


def python(code, paths=(), prefix=(), **environ):
    """The JSON that a few lines print, perhaps run by another command."""
    done = subprocess.run(
        [*prefix, sys.executable, '-c', code],
        env=environment(*paths, **environ),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def the(findings, level, *words):
    """The only finding of a level with these words."""
    matching = [f for f in findings if f.level == level and all(word in f.found for word in words)]
    assert len(matching) == 1, [f[:3] for f in findings]
    return matching[0]
