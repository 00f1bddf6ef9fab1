"""Running a function in several processes of one job, each with its launch variables."""

import fcntl
import functools
import multiprocessing
import os
import random
import socket
import sys
import tempfile
import threading
import time
import traceback
from contextlib import contextmanager
from importlib import import_module
from multiprocessing import forkserver, reduction, util
from multiprocessing.connection import wait

from tests.measuring import measured

# Processes are forked from a server that has imported these already and started no thread.
PRELOAD = ['tests.preloaded_first', 'mmengine.runner', 'mmdevplug.runner', 'tests.jobs']
if 'PJRT_DEVICE' in os.environ:
    PRELOAD.append('torch_xla')
PRELOAD.append('tests.preloaded')

#: How long a rank that is done waits for the others.
LINGER_SECONDS = 20

_ports, _taken = random.SystemRandom(), set()
#: Each process of tests locks the byte of a port that it takes.
_PORTS = os.open(
    f'{tempfile.gettempdir()}/mmdevplug-ports-of-tests-{os.getuid()}',
    os.O_RDWR | os.O_CREAT,
    0o600,
)
_context = multiprocessing.get_context('forkserver')
_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def free_port():
    """A free port of the loopback interface.

    Below those that the kernel hands out, and taken once, so that nothing of another test takes it
    before the job listens there.
    """
    while True:
        port = _ports.randrange(15_000, 32_000)
        if port in _taken:
            continue
        _taken.add(port)
        with socket.socket() as probe:
            try:
                fcntl.lockf(_PORTS, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
                probe.bind(('127.0.0.1', port))
            except OSError:
                continue
        return port


def launch_variables(rank, world_size, port):
    """What torchrun sets on a single host."""
    numbers = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world_size, LOCAL_WORLD_SIZE=world_size)
    variables = {name: str(number) for name, number in numbers.items()}
    return dict(variables, MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port), OMP_NUM_THREADS='1')


#: What torchrun sets besides, where its agent keeps the store that workers meet in.
AGENT = dict(
    TORCHELASTIC_RUN_ID='none',
    TORCHELASTIC_RESTART_COUNT='0',
    TORCHELASTIC_MAX_RESTARTS='0',
    TORCHELASTIC_USE_AGENT_STORE='True',
)


def _work(connection, environ, function, args, together=False, vendor=None, paths=()):
    sys.path[:0] = paths
    if vendor is not None:
        sys.path[:0] = vendor[1]
        import_module(vendor[0])  # where the server could not, this says why
    os.environ.update({name: value for name, value in environ.items() if value is not None})
    for name in [name for name, value in environ.items() if value is None]:
        os.environ.pop(name, None)
    import torch

    torch.set_num_threads(1)
    try:
        connection.send(('ok', measured(function, args)))
        # Rank 0 holds the store: it must not end while others still set up. One that fails ends at
        # once, so that others notice.
        connection.poll(LINGER_SECONDS)
    except BaseException as error:
        connection.send(('error', (type(error).__name__, str(error), traceback.format_exc())))
        if together:
            connection.poll(LINGER_SECONDS)
    connection.close()


class RanksFailed(AssertionError):
    """Some ranks raised.

    Attributes:
        errors (dict): For each rank that raised: type name, message, traceback.
    """

    def __init__(self, errors):
        self.errors = errors
        told = [f'rank {rank}: {trace}' for rank, (_, _, trace) in errors.items()]
        super().__init__('\n'.join(told))


def _skip_as_ranks_do(errors):
    import card
    import pytest

    if {kind for kind, _, _ in errors.values()} == {'Skipped'}:
        pytest.skip(next(iter(errors.values()))[1])
    if card.MISSING and any(message == card.MISSING for _, message, _ in errors.values()):
        pytest.skip(card.MISSING)


class _Descriptor:
    """An open file, which travels to a process that is being started; it gets another number."""

    def __init__(self, number):
        self.number = number

    def __reduce__(self):
        return _arrived, (reduction.DupFd(self.number),)


def _arrived(copy):
    return fcntl.fcntl(copy.detach(), fcntl.F_DUPFD, 512)  # not where the code expects another


def _become_server(paths, code, numbers, copies):
    """Go on as another server, whose code names open files by the numbers they had."""
    os.chdir(_ROOT)
    if paths:
        sys.path[:0] = paths
        before = os.environ.get('PYTHONPATH')
        os.environ['PYTHONPATH'] = os.pathsep.join([*paths, *([before] if before else [])])
    # Out of the way of all numbers first: one of them may be that of another copy.
    apart = [fcntl.fcntl(copy, fcntl.F_DUPFD, max(numbers) + 1) for copy in copies]
    for number, copy in zip(numbers, apart):
        os.dup2(copy, number)
    for copy in {*copies, *apart} - {*numbers}:
        os.close(copy)
    exec(code)


class _Server(forkserver.ForkServer):
    """A server that is forked from the first one, where what all of them import is there."""

    def __init__(self, modules, paths=()):
        super().__init__()
        self._running, self._paths = False, list(paths)
        self.set_forkserver_preload(modules)

    def ensure_running(self):
        if self._running:
            return
        start, util.spawnv_passfds = util.spawnv_passfds, self._fork
        try:
            super().ensure_running()
        finally:
            util.spawnv_passfds = start
        self._running = True

    def _fork(self, path, arguments, numbers):
        copies = [_Descriptor(number) for number in numbers]
        args = (self._paths, arguments[-1], numbers, copies)
        server = _context.Process(target=_become_server, args=args, daemon=True)
        with _processes_from(_first):
            server.start()
        return server.pid


@contextmanager
def _processes_from(server):
    before = forkserver.connect_to_new_process
    forkserver.connect_to_new_process = server.connect_to_new_process
    try:
        yield
    finally:
        forkserver.connect_to_new_process = before


_starting = threading.Lock()
_first = forkserver.ForkServer()
_first.set_forkserver_preload(['tests.preloaded_first'])
#: For each vendor's package, which was imported before MMEngine, or for None, and with or without
#: operators: a server.
_servers = {}


def _server_of(vendor, operators):
    """The server that processes come from."""
    package, paths = (None, ()) if vendor is None else vendor
    key = package, operators
    if key not in _servers:
        if vendor is not None:
            from tests.jobs import LEAN  # here, so that ranks import the package first

            paths = [*paths, *LEAN]
        modules = [*([package] if package else []), *PRELOAD]
        if operators:
            modules.append('tests.preloaded_operators')
        _first_server()
        _servers[key] = _Server(modules, paths)
    return _servers[key]


def _first_server():
    """The server that has imported PyTorch and nothing of MMEngine's."""
    folder = os.getcwd()
    # Python up to 3.12 hands a server no paths, and mmsegmentation installs a package `tests`.
    os.chdir(_ROOT)
    try:
        _first.ensure_running()
    finally:
        os.chdir(folder)
    return _first


def start_process(function, *args, vendor=None, mmengine=True, operators=False):
    """Start a process that has imported PyTorch, which the caller ends.

    Args:
        function (callable): A function of a module.
        *args: Its arguments.
        vendor (tuple, optional): As for :func:`run_ranks`.
        mmengine (bool): Whether it has imported MMEngine and this package, too.
        operators (bool): Whether it has imported mmcv's operators besides, if there are any.

    Returns:
        multiprocessing.Process: The process, started.
    """
    process = _context.Process(target=function, args=args)
    server = _server_of(vendor, operators) if mmengine else _first_server()
    with _starting, _processes_from(server):
        process.start()
    return process


def run_ranks(
    function,
    world_size,
    *args,
    timeout=240,
    environ=None,
    environ_of=None,
    together=False,
    vendor=None,
    paths=(),
    operators=True,
):
    """Call ``function(*args)`` in every rank of a job.

    Args:
        function (callable): A function of a module.
        world_size (int): Number of processes; 0 for one process without launch variables.
        timeout (float): Seconds until all must have ended.
        environ (dict, optional): More variables for all ranks; None removes one.
        environ_of (dict, optional): The same for single ranks.
        together (bool): Every rank raises by itself, so one that does waits for the others, which
            may still be setting up.
        vendor (tuple, optional): A vendor's package that each rank has imported before MMEngine,
            and the folders to find it in: see ``tests.native``.
        paths (sequence): Folders of packages that each rank finds first.
        operators (bool): Whether each rank has imported mmcv's operators, if there are any.

    Returns:
        list: What each rank returned.

    Raises:
        RanksFailed: If any rank raised.
        AssertionError: If a rank hangs or dies.
        Skipped: If all ranks skip, or one asked for a stand-in card that this release of PyTorch
            cannot have.
    """
    if vendor is not None:
        from tests.jobs import need_card  # here, so that ranks import a vendor's package first

        need_card()  # a server that cannot import the package ends without saying why
    port = free_port()
    ranks = {}
    for rank in range(max(world_size, 1)):
        variables = launch_variables(rank, world_size, port) if world_size else {}
        variables.update(environ or {})
        variables.update((environ_of or {}).get(rank, {}))
        ours, theirs = _context.Pipe()
        work = (theirs, variables, function, args, together, vendor, paths)
        process = start_process(_work, *work, vendor=vendor, operators=operators)
        theirs.close()
        ranks[rank] = (process, ours)
    results, errors = {}, {}
    deadline = time.monotonic() + timeout
    pending = {connection: rank for rank, (_, connection) in ranks.items()}
    try:
        while pending:
            ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
            assert ready, f'ranks {sorted(pending.values())} hang after {timeout} s'
            for connection in ready:
                rank = pending.pop(connection)
                try:
                    kind, value = connection.recv()
                except EOFError:
                    kind, value = 'error', ('Died', 'the process died', 'the process died')
                (results if kind == 'ok' else errors)[rank] = value
            if not pending or (errors and not together):
                for rank in [*results, *errors]:
                    ranks[rank][1].close()
        for process, _ in ranks.values():
            process.join(30)
    finally:
        for process, _ in ranks.values():
            if process.is_alive():
                process.kill()
    if errors:
        _skip_as_ranks_do(errors)
        raise RanksFailed(errors)
    return [results[rank] for rank in sorted(results)]


def errors_of_ranks(function, world_size, *args, **options):
    """Call ``function(*args)`` in ranks of which at least one is to raise; see :func:`run_ranks`.

    Returns:
        dict: For each rank that raised the type's name and the message.

    Raises:
        AssertionError: If no rank raises.
    """
    try:
        returned = run_ranks(function, world_size, *args, **options)
    except RanksFailed as failed:
        return {rank: (kind, message) for rank, (kind, message, _) in failed.errors.items()}
    raise AssertionError(f'no rank raised; they returned {returned}')


def check_errors(errors, kind, *words):
    """Assert that errors have a type, and messages in which there are all of the words.

    Args:
        errors (dict): As :func:`errors_of_ranks` returns them, of one rank or more.
        kind (str): The name of the errors' type.
        *words (str): Parts of each message.
    """
    assert errors
    for rank, (found, message) in errors.items():
        assert found == kind, (rank, message)
        for word in words:
            assert word in message, (rank, message)


def in_ranks(world_size=0, **options):
    """Run a test, which returns nothing, in every rank of a job; see :func:`run_ranks`.

    The parameter ``accelerator`` or ``device`` of a test is the device of the job, see
    :func:`tests.columns.job_of`. Its parameter ``ranks`` is their number.
    """

    def decorate(test):
        @functools.wraps(test)
        def run(**kwargs):
            from tests.columns import job_of  # here, as above

            ranks = kwargs.get('ranks', world_size)
            job = job_of(kwargs.get('accelerator', kwargs.get('device')), ranks)
            where = test.__module__, test.__name__
            run_ranks(_call_test, ranks, *where, kwargs, **dict(job, **options))

        return run

    return decorate


def _call_test(module, name, kwargs):
    getattr(import_module(module), name).__wrapped__(**kwargs)
