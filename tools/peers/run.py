"""Run MMEngine's own tests, unchanged, with mmdevplug active, each file in a process of its own.

Prints what fails and is not in ``known.txt``, and what is there and passes; either ends with
exit status 1. ``--stock`` runs them on MMEngine alone, to compare. The archive may be a release of
MMEngine's sources.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KNOWN = Path(__file__).with_name('known.txt')
#: Files of which one runs at a time, because they share ports.
PORTS = ('MASTER_PORT', 'MultiProcessTestCase', 'setup_dist_env')

sys.path[:] = [str(ROOT), *(path for path in sys.path if Path(path) != Path(__file__).parent)]
from tools.peers.files import read_known, report, run_files  # noqa: E402


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
        results, lines = run_files(files, options, plugins, in_turn=shares_ports)
    finally:
        os.chdir('/')
        shutil.rmtree(str(folder), ignore_errors=True)
    known = {} if options.stock else read_known(KNOWN, options.device)
    ran = {test.split('::')[0] for test in results}
    failed = {test for test, (outcome, _) in results.items() if outcome == 'failed'}
    stale = [test for test in known if test.split('::')[0] in ran and test not in failed]
    runners = sum('runner_on' in line for line in lines)
    told = (
        f"{options.device}: {len(files)} files of MMEngine's tests, {{}}; {runners} tests had a "
        f'DeviceRunner there ({time.monotonic() - started:.0f} s)'
    )
    return report(told, results, known, stale, KNOWN.relative_to(ROOT))


def folder_of_tests(folder):
    """The folder that holds ``tests``: a release has everything in one of its own."""
    for path in (folder, *folder.iterdir()):
        if (path / 'tests').is_dir():
            return path
    raise SystemExit(f'expected a folder `tests` in the archive, got {os.listdir(str(folder))}')


def prepare(options):
    """Import everything that tests need, for the processes that are forked from this one."""
    os.environ.update(OMP_NUM_THREADS='1', MKL_NUM_THREADS='1')
    import torch

    torch.set_num_threads(1)
    if options.device == 'xla':
        import torch_xla  # noqa: F401
    elif options.device not in ('cpu', 'cuda'):
        install_standin(options.device)
    from tools.peers.active import Active, activate, share_processes

    plugins = []
    if not options.stock:
        activate(options.device)
        plugins.append(Active(options.device))
    share_processes()
    import mmengine.testing  # noqa: F401

    return plugins


def install_standin(device):
    """Import the package of a vendor's card before MMEngine, as on a machine with such cards."""
    standins = ROOT / 'standins'
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


if __name__ == '__main__':
    sys.exit(main())
