"""Run PyTorch's own tests of torch.distributed, unchanged, with ``staged`` in gloo's place.

The tests of collectives and of DDP that PyTorch installs run always; an archive of its sources, or
their folder, adds files. Prints what fails and is neither in ``known_pytorch.txt`` nor fails over
gloo on the CPU, and what is there and passes; either ends with exit status 1.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KNOWN = Path(__file__).with_name('known_pytorch.txt')
#: What uses gloo, or the backend of whatever device there is, below test/distributed.
FILES = (
    *('test_c10d_gloo.py', 'test_c10d_object_collectives.py', 'test_c10d_functional_native.py'),
    *('test_c10d_spawn_gloo.py', 'test_functional_api.py', 'test_device_mesh.py', 'algorithms'),
    'optim',
)
#: For other devices these take NCCL, and their checkpoints want streams of the device.
ON_CPU = ('_composable', 'checkpoint', 'pipelining', 'tensor', '_tensor')
#: Two of them, which run at a time. PyTorch installs these tests, but not the file that runs them.
INSTALLED = """
import zlib
from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend


class TestDistBackendWithSpawn(TestDistBackend, DistributedTest._DistTestBase):
    def setUp(self):
        if zlib.crc32(self._testMethodName.encode()) % 2 != {half}:
            self.skipTest('in the other file')
        super().setUp()
        self._spawn_processes()
"""

sys.path[:] = [str(ROOT), *(path for path in sys.path if Path(path) != Path(__file__).parent)]
from tools.peers.files import read_known, report, run_files  # noqa: E402


def parse(arguments):
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('sources', nargs='?', help='of PyTorch: a .tar.gz, or a folder')
    parser.add_argument('--device', default='cpu', help="'cpu', or the name of a stand-in card")
    parser.add_argument('--stock', action='store_true', help='over gloo on the CPU')
    parser.add_argument('--only', default='', help='files whose path holds this text')
    parser.add_argument('--ranks', default='3', help='where tests leave it open (default: 3)')
    parser.add_argument('--workers', type=int, default=2, help='files at a time (default: 2)')
    parser.add_argument('--verbose', action='store_true', help='print how long each file takes')
    return parser.parse_args(arguments)


def main(arguments=None):
    """Run the files, those that fail over gloo as well, and compare what failed with the list."""
    options = parse(arguments)
    started = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix='pytorch-tests-'))
    try:
        os.chdir(str(lay_out(options.sources and Path(options.sources).resolve(), folder)))
        prepare(options)
        from tools.peers.in_place import StagedInPlace

        files, known = find_files(options), {}
        if options.stock:
            results, _ = run_files(files, options, [])
        else:
            known = read_known(KNOWN, options.device)
            results, _ = run_files(files, options, [StagedInPlace(options.device)])
            drop_what_fails_over_gloo(results, known, options)
    finally:
        os.chdir('/')
        shutil.rmtree(str(folder), ignore_errors=True)
    stale = [test for test in known if results.get(test, ('', ''))[0] == 'passed']
    backend = 'gloo' if options.stock else f'staged, {options.device}'
    seconds = time.monotonic() - started
    told = f"{backend}: {len(files)} files of PyTorch's tests, {{}} ({seconds:.0f} s)"
    return report(told, results, known, stale, KNOWN.relative_to(ROOT))


def lay_out(sources, folder):
    """Make the folder of tests, with those that are installed and those of the sources."""
    place = folder / 'distributed'
    if sources:
        unpacked = sources
        if sources.is_file():
            unpacked = folder / 'sources'
            shutil.unpack_archive(str(sources), str(unpacked))
        found = [unpacked / 'test' / 'distributed', *unpacked.glob('*/test/distributed')]
        found = [each for each in found if each.is_dir()]
        if not found:
            raise SystemExit(f"expected test/distributed in {sources}, PyTorch's sources")
        shutil.copytree(str(found[0]), str(place))
    place.mkdir(exist_ok=True)
    for half in range(2):
        (place / f'test_installed_{half}.py').write_text(INSTALLED.format(half=half))
    return place


def prepare(options):
    """Set and import what all files need, for the processes that are forked from this one."""
    os.environ.update(OMP_NUM_THREADS='1', MKL_NUM_THREADS='1', BACKEND='gloo')
    os.environ.update(WORLD_SIZE=options.ranks, TEMP_DIR=os.getcwd())
    os.environ.update(DISTRIBUTED_TESTS_DEFAULT_TIMEOUT='60', PYTORCH_PRINT_REPRO_ON_FAILURE='0')
    import torch
    from torch.testing._internal.common_distributed import MultiProcessTestCase

    # No torch.set_num_threads() here: threads of autograd cannot share its pool after a fork.
    fork = torch.multiprocessing.get_context('fork').Process
    # Spawned ranks would import everything anew, and would not have staged in gloo's place.
    MultiProcessTestCase._spawn_processes = lambda case: case._start_processes(fork)


def find_files(options):
    """The files of tests, the longest first."""
    found = [Path(f'test_installed_{half}.py') for half in range(2)]
    for name in (*FILES, *(ON_CPU if options.device == 'cpu' else ())):
        path = Path(name)
        found += [path] if path.is_file() else sorted(path.rglob('test_*.py'))
    wanted = [path for path in found if options.only in str(path)]
    return sorted(wanted, key=lambda path: (path not in found[:2], -path.stat().st_size))


def drop_what_fails_over_gloo(results, known, options):
    """Run files with failures that nobody knows over gloo, and forget those that it has, too."""
    new = {test for test, (told, _) in results.items() if told == 'failed' and test not in known}
    files = sorted({Path(test.split('::')[0]) for test in new})
    over_gloo, _ = run_files(files, options, [])
    for test in new:
        if over_gloo.get(test, ('', ''))[0] == 'failed':
            del results[test]


if __name__ == '__main__':
    sys.exit(main())
