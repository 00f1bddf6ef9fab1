"""Run checks in a separate process, because a vendor's library may hang or abort it.

A module with such checks has a ``section`` and a function ``work(task, options, say)`` that yields
findings and calls ``say(step)`` before each step.
"""

import multiprocessing
import os
import signal
import sys
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any, Dict, Iterator, Optional, Sequence

from .findings import Finding

#: What ``work`` gets besides a task: values that can be pickled, by the names of their options.
TaskOptions = Dict[str, Any]


def run_isolated(
    module: str, tasks: Sequence[str], options: TaskOptions, seconds: float
) -> Iterator[Finding]:
    """Call ``module.work`` for one task after the other; after a death, in a new process.

    A step that takes more than ``seconds`` counts as hanging.
    """
    remaining = list(tasks)
    while remaining:
        ours, theirs = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.get_context('spawn').Process(
            target=_run, args=(theirs, module, remaining, options)
        )
        process.start()
        theirs.close()
        step, how = 'starting Python', f'gave no answer for {seconds:.0f} s'
        try:
            while remaining and ours.poll(seconds):
                kind, value = ours.recv()
                if kind == 'step':
                    step = value
                elif kind == 'finding':
                    yield value
                else:
                    yield from [] if value is None else [_died(module, remaining[0], step, value)]
                    del remaining[0]
        except EOFError:
            process.join()
            how = f'ended the process with {_describe(process.exitcode)}'
        finally:
            process.kill()
            process.join()
        if remaining:
            yield _died(module, remaining.pop(0), step, how)


def _died(module: str, task: str, step: str, how: str) -> Finding:
    return import_module(module).section.error(
        f'{task}: {step} {how}', 'a training that needs it would end there, too.'
    )


def _describe(status: Optional[int]) -> str:
    names: Dict[Optional[int], str] = {-number.value: number.name for number in signal.Signals}
    return names.get(status, f'exit status {status}')


def _run(connection: Connection, module: str, tasks: Sequence[str], options: TaskOptions) -> None:
    os.dup2(2, 1)  # libraries print, and the report goes to the standard output
    work = import_module(module).work
    for task in tasks:
        raised = None
        try:
            for finding in work(task, options, lambda step: connection.send(('step', step))):
                connection.send(('finding', finding))
        except Exception as error:
            # Whatever a library raises is a finding; the next checks still run.
            raised = f'raised {type(error).__name__}: {error}'.rstrip('.')
        connection.send(('done', raised))
    sys.stderr.flush()
    os._exit(0)  # without the clean-up of vendors' libraries, which may abort
