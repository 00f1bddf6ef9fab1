"""Run MMEngine's own tests, unchanged, with mmdevplug active, each file in a process of its own.

Prints what fails and is not in ``known.txt``, and what is there and passes; either ends with
exit status 1. ``--stock`` runs them on MMEngine alone, to compare. The archive may be a release of
MMEngine's sources.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KNOWN = Path(__file__).with_name('known.txt')
#: Files of which one runs at a time, because they share ports.
PORTS = ('MASTER_PORT', 'MultiProcessTestCase', 'setup_dist_env')
SECONDS = 240


def parse(arguments):
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('archive', help="a .tar.gz with MMEngine's folder `tests`")
    parser.add_argument('--device', default='cpu', help='for all that names none (default: cpu)')
    parser.add_argument('--stock', action='store_true', help='without mmdevplug')
    parser.add_argument('--only', default='', help='files whose path holds this text')
    parser.add_argument('--folders', nargs='*', default=[], help='default: all of the archive')
    parser.add_argument('--workers', type=int, default=2, help='files at a time (default: 2)')
    parser.add_argument('--verbose', action='store_true', help='print how long each file takes')
    return parser.parse_args(arguments)


def main(arguments=None):
    """Run the files and compare what failed with the list."""
    options = parse(arguments)
    started = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix='mmengine-tests-'))
    try:
        shutil.unpack_archive(options.archive, str(folder))
        os.chdir(str(folder_of_tests(folder)))
        plugins = prepare(options)
        files = find_files(options)
        results, runners = run_files(files, options, plugins)
    finally:
        os.chdir('/')
        shutil.rmtree(str(folder), ignore_errors=True)
    known = {} if options.stock else read_known(options.device)
    passed = [test for test, (outcome, _) in results.items() if outcome == 'passed']
    failed = {test: told for test, (outcome, told) in results.items() if outcome == 'failed'}
    new = {test: told for test, told in failed.items() if test not in known}
    ran = {test.split('::')[0] for test in results}
    stale = [test for test in known if test.split('::')[0] in ran and test not in failed]
    print(
        f"{options.device}: {len(files)} files of MMEngine's tests, {len(passed)} passed, "
        f'{len(failed)} failed, of these not expected: {len(new)}; {runners} tests had a '
        f'DeviceRunner there ({time.monotonic() - started:.0f} s)'
    )
    for test, told in sorted(new.items()):
        print(f'  failed: {test}')
        print('    ' + '\n    '.join(told.splitlines()))
    for test in stale:
        print(f'  passes, remove it from {KNOWN.relative_to(ROOT)}: {test}')
    if not passed:
        print('  nothing passed: expected tests in that archive, in files as --only says')
    return 1 if new or stale or not passed else 0


def folder_of_tests(folder):
    """The folder that holds ``tests``: a release has everything in one of its own."""
    for path in (folder, *folder.iterdir()):
        if (path / 'tests').is_dir():
            return path
    raise SystemExit(f'expected a folder `tests` in the archive, got {os.listdir(str(folder))}')


def prepare(options):
    """Import everything that tests need, for the processes that are forked from this one."""
    sys.path[:] = [str(ROOT), *(p for p in sys.path if Path(p) != Path(__file__).parent)]
    os.environ.update(OMP_NUM_THREADS='1', MKL_NUM_THREADS='1')
    import torch

    torch.set_num_threads(1)
    if options.device == 'xla':
        import torch_xla  # noqa: F401
    elif options.device not in ('cpu', 'cuda'):
        install_standin(options.device)
    from tests.peers.active import Active, activate, share_processes

    plugins = []
    if not options.stock:
        activate(options.device)
        plugins.append(Active(options.device))
    share_processes()
    import mmengine.testing  # noqa: F401

    return plugins


def install_standin(device):
    """Import the package of a vendor's card before MMEngine, as on a machine with such cards."""
    standins = ROOT / 'tests' / 'standins'
    paths = [standins / 'native' / device, standins / 'native', standins / 'fakecard']
    sys.path[:0] = map(str, paths)
    os.environ['PYTHONPATH'] = os.pathsep.join([*map(str, paths), str(ROOT)])
    import_module(f'torch_{device}')


def find_files(options):
    """The files of tests, those that share ports first: they take turns."""
    found = []
    for path in sorted(Path('tests').rglob('test_*.py')):
        wanted = not options.folders or any(str(path).startswith(f) for f in options.folders)
        if wanted and options.only in str(path) and path.parts[1] != 'data':
            found.append(path)
    return sorted(found, key=lambda path: (not shares_ports(path), -path.stat().st_size))


def shares_ports(path):
    """Whether a file's tests listen on ports that other files use, too."""
    return any(word in path.read_text(encoding='utf-8') for word in PORTS)


def run_files(files, options, plugins):
    """Run each file in a process.

    Returns:
        tuple: By test, the outcome and what is told of a failure; and in how many tests
        DeviceRunner started on the device.
    """
    results, waiting, running = {}, list(files), {}
    runners = 0
    while waiting or running:
        taken = any(on_ports for _, _, on_ports, _ in running.values())
        ready = [path for path in waiting if not (taken and shares_ports(path))]
        if ready and len(running) < options.workers:
            path = ready[0]
            waiting.remove(path)
            record = Path(f'{str(path).replace(os.sep, "_")}.json')
            pid = start(path, record, plugins)
            running[pid] = (path, record, shares_ports(path), time.monotonic() + SECONDS)
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
        runners += sum('runner_on' in line for line in lines)
    return results, runners


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


def read_known(device):
    """The tests that are known to fail on a device: see the head of the file."""
    known = {}
    for line in KNOWN.read_text(encoding='utf-8').splitlines():
        if line.strip() and not line.startswith('#'):
            devices, test, reason = line.split(None, 2)
            if device in devices.split(','):
                known[test] = reason
    return known


if __name__ == '__main__':
    sys.exit(main())
