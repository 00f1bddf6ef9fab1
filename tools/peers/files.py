"""Run files of other projects' tests, each in a process of its own, and report what fails."""

import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

#: How long a file may take.
SECONDS = 240


def run_files(files, options, plugins, in_turn=lambda path: False):
    """Run each file in a process.

    Args:
        files (list[Path]): The files, below the working directory.
        options (Namespace): ``workers``, files at a time, and ``verbose``.
        plugins (list): pytest's, for every file.
        in_turn (Callable): Of which files one runs at a time.

    Returns:
        tuple: A dict from each test to its outcome and the text of a failure; and the records.
    """
    results, told_lines, waiting, running = {}, [], list(files), {}
    while waiting or running:
        taken = any(on_ports for _, _, on_ports, _ in running.values())
        ready = [path for path in waiting if not (taken and in_turn(path))]
        if ready and len(running) < options.workers:
            path = ready[0]
            waiting.remove(path)
            record = Path(f'{str(path).replace(os.sep, "_")}.json')
            with suppress(FileNotFoundError):
                record.unlink()  # of an earlier run
            pid = start(path, record, plugins)
            running[pid] = (path, record, in_turn(path), time.monotonic() + SECONDS)
            continue
        ended = reap(running)
        if ended is None:
            time.sleep(0.05)
            continue
        (path, record, _, deadline), told = ended
        if options.verbose:
            print(f'{time.monotonic() - deadline + SECONDS:6.1f} s  {path}')
        lines = read_record(record)
        results.update(outcomes(path, record, lines, told))
        told_lines += lines
    return results, told_lines


def start(path, record, plugins):
    """Fork a process that runs one file."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 3
    try:
        os.setsid()
        output = os.open(f'{record}.out', os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        arguments = [str(path), '-q', '-p', 'no:cacheprovider', '-p', 'no:xdist']
        arguments += ['-W', 'ignore', '--rootdir', '.', '-c', os.devnull]
        code = pytest.main(arguments, plugins=[*plugins, Record(record)])
    finally:
        sys.stdout.flush()
        os._exit(int(code))


def reap(running):
    """The process that has ended, and how, if one has; one that takes too long is killed."""
    for pid, (_, _, _, deadline) in list(running.items()):
        if time.monotonic() > deadline:
            os.killpg(pid, signal.SIGKILL)
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # what a test may have left
            late = time.monotonic() > deadline
            told = f'took more than {SECONDS} s' if late else f'ended with status {status}'
            return running.pop(pid), told
    return None


def read_record(record):
    """What the process of one file has written."""
    lines = record.read_text(encoding='utf-8').splitlines() if record.exists() else []
    return [json.loads(line) for line in lines]


def outcomes(path, record, found, told):
    """The outcome of each test; a file whose process died counts as a failed test."""
    results = {}
    for each in found:
        if 'test' not in each:
            continue
        # A test that fails in its set-up or clean-up has several lines.
        if results.get(each['test'], ('', ''))[0] != 'failed':
            results[each['test']] = (each['outcome'], each['told'])
    if not any('finished' in each for each in found):
        output = Path(f'{record}.out').read_text(encoding='utf-8', errors='replace')
        results[str(path)] = ('failed', f'{told}\n{output[-2000:]}')
    return results


class Record:
    """Writes the outcome of each test, as it comes, to a file.

    Args:
        path (Path): Where.
    """

    def __init__(self, path):
        self.path = path.absolute()

    def _write(self, **values):
        with self.path.open('a', encoding='utf-8') as file:
            file.write(json.dumps(values) + '\n')

    def pytest_runtest_logreport(self, report):
        """Write one test's outcome."""
        if report.when == 'call' or report.outcome != 'passed':
            told = str(report.longrepr)[-3000:] if report.outcome == 'failed' else ''
            self._write(test=report.nodeid, outcome=report.outcome, told=told)
        if report.when == 'teardown':
            for name, device in report.user_properties:
                if name == 'runner_on':
                    self._write(runner_on=device)

    def pytest_collectreport(self, report):
        """Write that a file cannot be imported."""
        if report.failed:
            self._write(test=report.nodeid, outcome='failed', told=str(report.longrepr)[-3000:])

    def pytest_sessionfinish(self):
        """Write that all tests of the file have had their turn."""
        self._write(finished=True)


def report(told, results, known, stale, listed_in):
    """Print what fails and is not known, and what is known and passes.

    Args:
        told (str): What ran, with a place for the counts.
        results (dict): For each test its outcome and the text of a failure.
        known (dict): The reasons, by test.
        stale (list[str]): Tests that are known to fail and do not.
        listed_in (Path): Where they are listed.

    Returns:
        int: The exit status.
    """
    passed = [test for test, (outcome, _) in results.items() if outcome == 'passed']
    failed = {test: told for test, (outcome, told) in results.items() if outcome == 'failed'}
    new = {test: told for test, told in failed.items() if test not in known}
    counts = f'{len(passed)} passed, {len(failed)} failed, of these not expected: {len(new)}'
    print(told.format(counts))
    for test, why in sorted(new.items()):
        print(f'  failed: {test}')
        print('    ' + '\n    '.join(why.splitlines()))
    for test in stale:
        print(f'  passes, remove it from {listed_in}: {test}')
    if not passed:
        print('  nothing passed: expected tests in that archive, in files as --only says')
    return 1 if new or stale or not passed else 0


def read_known(path, device):
    """The tests that are known to fail on a device: see the head of the file."""
    known = {}
    for line in path.read_text(encoding='utf-8').splitlines():
        if line.strip() and not line.startswith('#'):
            devices, test, reason = line.split(None, 2)
            if device in devices.split(','):
                known[test] = reason
    return known
