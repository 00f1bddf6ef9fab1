"""Running the doctor as a user does, in a process of its own."""

import json
import textwrap

from tests import commands
from tests.cli.running import STANDIN

#: Variables of this test run that would be findings of their own.
CLEAN = dict.fromkeys(['RANK', 'WORLD_SIZE', 'MASTER_PORT', 'GLOO_SOCKET_IFNAME'])


def environment(*paths, **environ):
    """Variables for a child; None removes one."""
    return commands.environment(*paths, STANDIN, **{**CLEAN, **environ})


def doctor(*arguments, paths=(), **environ):
    return commands.run(*commands.CLI, 'doctor', *arguments, env=environment(*paths, **environ))


def examined(folder, *arguments, **options):
    """The exit status and the JSON of a run."""
    path = folder / 'doctor.json'
    done = doctor(*arguments, '--json', path, **options)
    assert path.is_file(), done.stderr
    assert 'Traceback' not in done.stderr
    return done, json.loads(path.read_text())


def package(folder, name, text=''):
    """A package that is found before the one that is installed."""
    path = folder / name
    path.mkdir(exist_ok=True)
    (path / '__init__.py').write_text(textwrap.dedent(text))
    return path


def the(findings, level, *words):
    """The only finding of a level with these words."""
    matching = [f for f in findings if f.level == level and all(word in f.found for word in words)]
    assert len(matching) == 1, [f[:3] for f in findings]
    return matching[0]
