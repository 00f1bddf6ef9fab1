"""Run checks in a separate process, because a vendor's library may hang or abort it.

A module with such checks has a function ``work(task, options, say)`` that yields findings and
calls ``say(step)`` before each step. Its process writes one JSON message a line; the last step
names what it was doing when it ended or stopped answering.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, NamedTuple, Optional, Sequence, Union

import psutil

from .findings import Finding

POLL_SECONDS = 0.05
MOST_OUTPUT = 1 << 14


class Death(NamedTuple):
    """A check that ended early: its task and step, how it ended, and the end of its output."""

    task: str
    step: str
    how: str
    output: str

    def describe(self) -> str:
        """One phrase for a finding."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        # Where Python was, if a signal ended it; else the last line.
        places = [line for line in lines if line.startswith('File "')]
        last = f' It printed: {(places or lines[::-1])[0][:300]}' if lines else ''
        return f'{self.task}: {self.step} {self.how}.{last}'


def run_isolated(
    module: str, tasks: Sequence[str], options: Dict[str, Any], seconds: float
) -> Iterator[Union[Finding, Death]]:
    """Call ``module.work`` for one task after the other; after a death, in a new process.

    A step that takes more than ``seconds`` counts as hanging.
    """
    remaining = list(tasks)
    while remaining:
        with tempfile.TemporaryDirectory(prefix='mmdevplug-doctor-') as folder:
            messages, printed = Path(folder) / 'messages', Path(folder) / 'printed'
            messages.touch()
            command = [sys.executable, '-X', 'faulthandler', '-m', __name__, module]
            command += [str(messages), json.dumps(options), *remaining]
            activity = partial(os.path.getsize, str(messages))
            status = run_watched(command, printed, activity, seconds)
            lines = messages.read_text(encoding='utf-8').splitlines()
            output = printed.read_bytes()[-MOST_OUTPUT:].decode(errors='replace')
        step = 'starting Python'
        for kind, value in map(json.loads, lines):
            if kind == 'step':
                step = value
            elif kind == 'finding':
                yield Finding(**value)
            else:
                task = remaining.pop(0)
                if kind == 'raised':
                    yield Death(task, step, f'raised {value.rstrip(".")}', '')
        if remaining:
            yield Death(remaining.pop(0), step, describe_end(status, seconds), output)


def run_watched(
    command: Sequence[str],
    output: Path,
    activity: Callable[[], Any],
    seconds: float,
    environ: Optional[Dict[str, str]] = None,
) -> Optional[int]:
    """Run a command, and kill it and its children if ``activity()`` does not change for long.

    The result is the exit status; None if the command was killed.
    """
    with open(str(output), 'wb') as file:
        process = subprocess.Popen(
            command, env=environ, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
        )
    try:
        seen, deadline = activity(), time.monotonic() + seconds
        while process.poll() is None and time.monotonic() < deadline:
            found = activity()
            if found != seen:
                seen, deadline = found, time.monotonic() + seconds
            time.sleep(POLL_SECONDS)
        return process.returncode
    finally:
        _end_tree(process)


def describe_end(status: Optional[int], seconds: float) -> str:
    """Describe what :func:`run_watched` returned, e.g. ``'ended the process with SIGABRT'``."""
    if status is None:
        return f'gave no answer for {seconds:.0f} s'
    if status >= 0:
        return f'ended the process with exit status {status}'
    names = {number.value: number.name for number in signal.Signals}
    return f'ended the process with {names.get(-status, f"signal {-status}")}'


def _end_tree(process: subprocess.Popen) -> None:
    """Kill a process and all its children, also those in another session."""
    with suppress(psutil.NoSuchProcess):
        parent = psutil.Process(process.pid)
        for member in [*parent.children(recursive=True), parent]:
            with suppress(psutil.NoSuchProcess):
                member.kill()
    process.wait()


def main(module: str, messages: str, options: str, *tasks: str) -> None:
    """Run tasks in this process; the arguments are those of :func:`run_isolated` as text."""
    with open(messages, 'w', encoding='utf-8') as file:

        def send(kind: str, value: Any = None) -> None:
            file.write(json.dumps([kind, value]) + '\n')
            file.flush()

        work = import_module(module).work
        for task in tasks:
            try:
                for finding in work(task, json.loads(options), lambda step: send('step', step)):
                    send('finding', finding.as_dict())
            except Exception as error:
                # Whatever a library raises is a finding; the next checks still run.
                send('raised', f'{type(error).__name__}: {error}')
            else:
                send('done')
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)  # without the clean-up of vendors' libraries, which may abort


if __name__ == '__main__':
    main(*sys.argv[1:])
