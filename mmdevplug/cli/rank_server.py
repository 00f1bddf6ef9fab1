"""Fork the ranks of this host from one process that has imported PyTorch and MMEngine.

The command starts a server with the command line of a rank. The server checks the devices in a
forked process while it imports, and then waits for requests. What it forks returns from
:func:`serve`, and goes on as a rank would that had imported everything by itself.
"""

import atexit
import ctypes
import gc
import os
import shutil
import signal
import subprocess
import sys
import time
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import Pipe, reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, List, Mapping, Optional, Sequence, Union

from mmdevplug.errors import LaunchError

from . import say
from .forward_signals import SIGNALS

#: The variable that tells a process that it is a server, and on which file it is asked.
_SERVER = 'MMDEVPLUG_RANK_SERVER'
#: What ranks import; what the config names is left to them.
_MODULES = (
    *('mmengine.runner', 'mmdevplug.runner', 'torch._dynamo', 'mmcv'),
    *('matplotlib.figure', 'matplotlib.backends.backend_agg'),  # by MMEngine's visualizer
)
#: How long a server that nobody asks may take to end.
_END_SECONDS = 5.0
#: Threads of the driver, which NVML starts and a forked process does not need, and of an allocator
#: that looks after forks.
_MIND_NO_FORK = ('cuda', 'jemalloc')
_CUDA_ERROR_NOT_INITIALIZED = 3
#: `prctl`: end with the parent; become the parent of grandchildren whose own has ended.
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def preload(*names: str) -> None:
    """Import modules, by default all that training needs, without garbage collection.

    It takes 0.6 s of these imports, and 0.5 s of the end of a process that has done them. Nothing
    that is imported so far is collected later: forked processes share its memory.
    """
    collects = gc.isenabled()
    gc.disable()
    for name in names or _MODULES:
        if find_spec(name) is not None:  # no mmcv, or PyTorch 1
            import_module(name)
    gc.freeze()
    if collects:
        gc.enable()


# the server --------------------------------------------------------------------------------------


def serve() -> Optional[List[str]]:
    """Fork ranks if this process is a server; return in each of them, and where it is none.

    Returns:
        list, optional: What is to be checked, in the process that checks the devices.
    """
    number = os.environ.pop(_SERVER, None)
    if number is None:
        return None
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        ctypes.CDLL('libcuda.so.1')
    except OSError:
        os.environ['CUDA_VISIBLE_DEVICES'] = ''  # PyTorch would look for a driver, and not by NVML
    agent = Connection(int(number))
    import_module('mmdevplug.accelerators')
    try:
        checked = _serve_next(agent)  # while this process imports the rest
        if checked is None:
            preload()
            agent.send(_why_not_forked())
        while checked is None:
            checked = _serve_next(agent)
    except (EOFError, ConnectionError):  # the agent has closed it
        atexit._run_exitfuncs()
        os._exit(0)  # in place of taking all modules apart, which takes 0.3 s
    return checked or None


def _serve_next(agent: Connection) -> Optional[List[str]]:
    """Fork a process; return None here, and there what it checks."""
    environ, checked, redirected = agent.recv()
    files = {number: reduction.recv_handle(agent) for number in redirected}
    reason = _why_not_forked() if checked else None
    agent.send(reason)
    forked = reason is not None or _fork(agent)
    if forked:
        agent.close()
        os.environ.clear()
        os.environ.update(environ)
        for number, file in files.items():
            os.dup2(file, number)
        # The server does this when it ends, for matplotlib where HOME cannot be written to.
        atexit.unregister(shutil.rmtree)
        # As at their import; Python's generator is seeded by the fork.
        import_module('numpy').random.seed()
        import_module('torch').default_generator.seed()
        # A shell that starts a job beside it ignores this one, and the agent, which catches it,
        # would have ranks that it starts do so, too.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    for file in files.values():
        os.close(file)
    return checked if forked else None


def _fork(agent: Connection) -> bool:
    """Fork a child of the agent, and send its number; return True in it.

    It leads a session, as PyTorch's launcher has it. Its parent here ends at once, whereupon the
    agent becomes its parent.
    """
    readable, writable = os.pipe()
    between = os.fork()
    if between == 0:
        between = os.getpid()
        try:
            if os.fork() == 0:
                os.close(readable)
                os.setsid()
                while os.getppid() == between:
                    time.sleep(0.001)
                os.write(writable, str(os.getpid()).encode())
                os.close(writable)
                return True
        except OSError as error:
            os.write(writable, str(error).encode())
        os._exit(0)
    os.close(writable)
    os.waitpid(between, 0)
    agent.send(os.read(readable, 1000).decode())
    os.close(readable)
    return False


def _why_not_forked() -> Optional[str]:
    """Why ranks cannot be forked from this process, '' without a word; None if they can."""
    import torch

    if sys.platform != 'linux':
        return f'the system is {sys.platform}'
    name = getattr(torch._C, '_get_privateuse1_backend_name', lambda: 'privateuseone')()
    if name != 'privateuseone':
        return f'PyTorch or MMEngine has imported the package for {name!r}'
    # PyTorch before 2.0 does so without NVML, and PyTorch for ROCm.
    nvml = torch.version.hip is None and hasattr(torch.cuda, '_nvml_based_avail')
    built = torch.version.cuda is not None or torch.version.hip is not None
    child = os.fork()  # which ends the threads of libraries that mind forks, such as OpenBLAS
    if child == 0:
        os._exit(torch.cuda._is_in_bad_fork() or _cuda_is_lost())
    if os.waitpid(child, 0)[1] or (built and not nvml):
        return ''  # MMEngine asks CUDA for its devices; nobody can change that
    names = [(task / 'comm').read_text().strip() for task in Path('/proc/self/task').iterdir()]
    names.remove(Path('/proc/self/comm').read_text().strip())
    minding = sorted(name for name in names if not name.startswith(_MIND_NO_FORK))
    if not minding:
        return None
    return f'an imported package has started {len(minding)} thread(s), {", ".join(minding)}'


def _cuda_is_lost() -> bool:
    """Whether CUDA refuses this process because the one that it was forked from has begun it."""
    try:
        return ctypes.CDLL('libcuda.so.1').cuInit(0) == _CUDA_ERROR_NOT_INITIALIZED
    except OSError:
        return False


def _prctl(option: int, value: int) -> None:
    if sys.platform == 'linux':
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


# the agent ---------------------------------------------------------------------------------------


class RankServer:
    """A process from which ranks are forked.

    Args:
        command (list): What starts a rank.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)
        self._environ = dict(os.environ)
        self._agent, theirs = Pipe()
        with theirs:
            file = theirs.fileno()
            # With NVML MMEngine asks for CUDA devices without initializing CUDA.
            more = {_SERVER: str(file), 'PYTORCH_NVML_BASED_CUDA_CHECK': '1'}
            self._process = subprocess.Popen(
                self._command, env={**self._environ, **more}, pass_fds=[file]
            )
        self._forks: Optional[bool] = None  # not known yet

    @property
    def pid(self) -> int:
        """The process id of the server."""
        return self._process.pid

    def check(self, words: Sequence[str]) -> 'Process':
        """Start to check the devices with these words."""
        return self._request(self._environ, list(words), {})

    def can_fork(self, command: Sequence[str], environ: Mapping[str, str]) -> bool:
        """Whether a rank can be forked; if not, a line has said why."""
        if self._forks is None:
            self._note(self._receive())
        threads = 'OMP_NUM_THREADS'
        same = self._environ.get(threads) == environ.get(threads)
        return bool(self._forks) and same and list(command) == self._command

    def fork(self, environ: Mapping[str, str], redirected: Mapping[int, IO]) -> 'Process':
        """Fork a rank with all of its variables, and with files in place of its output."""
        return self._request(environ, [], redirected)

    def _request(
        self, environ: Mapping[str, str], checked: List[str], redirected: Mapping[int, IO]
    ) -> 'Process':
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        try:
            self._agent.send((dict(environ), checked, list(redirected)))
            for file in redirected.values():
                reduction.send_handle(self._agent, file.fileno(), self.pid)
            reason = self._receive()
            if reason is not None:
                self._note(reason)
                return self._process  # which does it without a fork
            answer = self._receive()
        except OSError:
            raise self._ended() from None
        finally:
            _prctl(_PR_SET_CHILD_SUBREAPER, 0)
        if not answer.isdecimal():
            raise LaunchError(f'a process cannot be forked: {answer}. Start fewer processes.')
        return ForkedProcess(int(answer))

    def _receive(self) -> Any:
        try:
            return self._agent.recv()
        except EOFError:
            raise self._ended() from None

    def _ended(self) -> LaunchError:
        status = self._process.wait()
        return LaunchError(
            f'the process (pid {self.pid}) from which ranks are forked has ended with status '
            f'{status}. What it printed is above; start the job again.'
        )

    def _note(self, reason: Optional[str]) -> None:
        self._forks = reason is None
        if reason:
            say(
                f'ranks are not forked from one process, because {reason}: the start takes longer.'
            )

    def __enter__(self) -> 'RankServer':
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """End the server; ranks go on."""
        self._agent.close()
        try:
            self._process.wait(_END_SECONDS if self._forks else 0)  # it may still import
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class ForkedProcess:
    """A child of this process that it has not forked itself, with the methods of Popen."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: Optional[int] = None

    def poll(self) -> Optional[int]:
        """Return the exit status, negative after a signal; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                ended = os.WIFSIGNALED(status)
                self.returncode = -os.WTERMSIG(status) if ended else os.WEXITSTATUS(status)
        return self.returncode

    def wait(self, timeout: float = float('inf')) -> int:
        """Wait for the end, and return the exit status."""
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(f'rank (pid {self.pid})', timeout)
            time.sleep(0.02)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


Process = Union[subprocess.Popen, ForkedProcess]
