"""Checks in a process of their own, because a vendor's library may hang or abort it.

A module with such checks has a function ``work(task, options, say)`` that yields findings and
tells by ``say(step)`` what it is about to do. The process that runs it writes one JSON list a
line; what it was doing when it ended or stopped answering is the last line.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Sequence, Union

import psutil

from .findings import Finding

POLL_SECONDS = 0.05
MOST_OUTPUT = 1 << 14


class Death(NamedTuple):
    """A check that came to no end.

    Attributes:
        task (str): Which.
        step (str): What it was doing.
        how (str): What became of the process.
        output (str): The end of what it printed.
    """

    task: str
    step: str
    how: str
    output: str

    def describe(self) -> str:
        """One phrase for a finding."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        # Where Python was, if a signal ended it; else what it said last.
        places = [line for line in lines if line.startswith('File "')]
        told = f' Its last words: {(places or lines[::-1])[0][:300]}' if lines else ''
        return f'{self.task}: {self.step} {self.how}.{told}'


Told = Union[Finding, Death]


def run_isolated(
    module: str, tasks: Sequence[str], options: Dict[str, Any], seconds: float
) -> Iterator[Told]:
    """Run checks one after the other; those behind one that dies get another process.

    Args:
        module (str): The module whose ``work`` is called for each task.
        tasks (Sequence[str]): Which.
        options (dict): For all of them, as JSON takes it.
        seconds (float): How long a step may take.

    Yields:
        Finding or Death: In the order of the tasks.
    """
    left = list(tasks)
    while left:
        with tempfile.TemporaryDirectory(prefix='mmdevplug-doctor-') as folder:
            told = _run(module, left, options, seconds, Path(folder))
        ended = [words[1] for words in told.lines if words[0] in ('done', 'raised')]
        for words in told.lines:
            if words[0] == 'finding':
                yield Finding(**words[2])
            elif words[0] == 'raised':
                yield Death(words[1], words[2], f'raised {words[3]}', '')
        left = left[len(ended) :]
        if left:
            yield Death(left.pop(0), told.step, told.how, told.output)


class _Run(NamedTuple):
    lines: List[List[Any]]
    how: str
    output: str

    @property
    def step(self) -> str:
        steps = [words[2] for words in self.lines if words[0] == 'step']
        return steps[-1] if steps else 'starting Python'


def _run(
    module: str, tasks: List[str], options: Dict[str, Any], seconds: float, folder: Path
) -> _Run:
    lines, printed = folder / 'lines', folder / 'printed'
    lines.touch()
    command = [sys.executable, '-X', 'faulthandler', '-m', __name__, module, str(lines)]
    command += [json.dumps(options), *tasks]
    with open(str(printed), 'wb') as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        how = _watch(process, lines, seconds)
    finally:
        end_tree(process)
    found = lines.read_text(encoding='utf-8').splitlines()
    output_tail = printed.read_bytes()[-MOST_OUTPUT:].decode(errors='replace')
    return _Run([json.loads(line) for line in found], how, output_tail)


def _watch(process: subprocess.Popen, lines: Path, seconds: float) -> str:
    size, deadline = 0, time.monotonic() + seconds
    while process.poll() is None:
        grown = lines.stat().st_size
        if grown != size:
            size, deadline = grown, time.monotonic() + seconds
        if time.monotonic() > deadline:
            return f'gave no answer for {seconds:.0f} s'
        time.sleep(POLL_SECONDS)
    return describe_status(process.returncode)


def describe_status(status: int) -> str:
    """What became of a process.

    Examples:
        >>> describe_status(-6)
        'ended the process with SIGABRT'
    """
    if status < 0:
        try:
            return f'ended the process with {signal.Signals(-status).name}'
        except ValueError:
            return f'ended the process with signal {-status}'
    return f'ended the process with exit status {status}'


def end_tree(process: subprocess.Popen) -> None:
    """End a process and all it started, also what has a session of its own."""
    try:
        parent = psutil.Process(process.pid)
        family = [*parent.children(recursive=True), parent]
    except psutil.NoSuchProcess:
        family = []
    for member in family:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue  # it ended by itself
    process.wait()


def main() -> None:
    """Run the tasks of the command line."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument('module')
    parser.add_argument('lines')
    parser.add_argument('options', type=json.loads)
    parser.add_argument('tasks', nargs='+')
    args = parser.parse_args()
    with open(args.lines, 'w', encoding='utf-8') as file:

        def tell(*words: Any) -> None:
            file.write(json.dumps(words) + '\n')
            file.flush()

        work = import_module(args.module).work
        for task in args.tasks:
            _work(work, task, args.options, tell)
        # Without the clean-up of vendors' libraries, which is no part of what was asked.
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)


def _work(work: Any, task: str, options: Dict[str, Any], tell: Any) -> None:
    step = ['the check']

    def say(what: str) -> None:
        step[0] = what
        tell('step', task, what)

    try:
        for finding in work(task, options, say):
            tell('finding', task, finding.as_dict())
    except Exception as error:
        # Whatever a library raises is a finding, and never the end of the examination.
        tell('raised', task, step[0], f'{type(error).__name__}: {error}')
        return
    tell('done', task)


if __name__ == '__main__':
    main()
