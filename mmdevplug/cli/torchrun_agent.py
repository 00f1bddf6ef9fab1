"""Run torchrun's agent with its store on the loopback interface, for jobs on one host.

By itself torchrun's store listens on every interface of the host and answers whoever connects.
PyTorch gives one store to all who ask for the same port in one process, so a store that listens on
loopback already is the one that torchrun takes.

    python -m mmdevplug.cli.torchrun_agent --nproc_per_node 2 --master_port 0 train.py ...
"""

import logging
import os
import signal
import socket
import sys
import tempfile
import time
from argparse import Namespace
from typing import Any, Dict, List, Optional

from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import parse_args, run

from mmdevplug.environments.launch_variables import DEFAULT_PORT
from mmdevplug.environments.loopback import LOOPBACK, is_loopback, loopback_store
from mmdevplug.environments.torchrun import AGENT
from mmdevplug.errors import LaunchError
from mmdevplug.utils.patching import patch_symbol

from . import say
from .elastic_agent import elastic, explain_meeting, meeting_point, meeting_timeout
from .forward_signals import RankSignals, end_leftovers, exit_status
from .rank_server import RankServer

#: PyTorch 1 has it in another module.
_HANDLER = (
    'torch.distributed.elastic.multiprocessing.'
    'subprocess_handler.subprocess_handler.SubprocessHandler'
)
#: Whether torchrun can leave signals to us: not in PyTorch 2.9 and before.
_CHOOSES_SIGNALS = hasattr(LaunchConfig, 'signals_to_handle')


@record
def main(argv: Optional[List[str]] = None) -> int:
    """Run torchrun; ``--master_port 0`` takes a free port of a single host.

    Exceptions that need no traceback are caught here: `record` of PyTorch 1.10 prints one.
    """
    try:
        args = read_arguments(argv)
        if _CHOOSES_SIGNALS:
            args.signals_to_handle = 'SIGURG'  # it takes no empty list; nobody sends this one
        store = _hold_store(args)  # kept for as long as torchrun runs
        _wait_for_name(args)
        with explain_meeting(args), elastic(args):
            run(args)
        del store
    except LaunchError as error:
        say(f'LaunchError: {error}')
        return 1
    except SignalException:
        return 1  # the signal decides the status, in `run_agent`
    return 0


def read_arguments(argv: Optional[List[str]] = None) -> Namespace:
    """Read torchrun's arguments from the command line alone.

    By itself torchrun takes what the command line leaves out from variables such as
    ``PET_NODE_RANK``, which operators of Kubernetes set in every pod.
    """
    hidden = {k: v for k, v in os.environ.items() if k.startswith('PET_')}
    for name in hidden:
        del os.environ[name]
    try:
        args = parse_args(argv)
    finally:
        os.environ.update(hidden)
    if hidden:
        found = ' '.join(f'{name}={value}' for name, value in hidden.items())
        say(f'ignored: {found}. The command line says how this job is started.')
    return args


def _hold_store(args: Namespace) -> Any:
    """Make the store that torchrun will take, if all of the job is on this host."""
    single_host = str(args.nnodes) in ('1', '1:1') and is_loopback(args.master_addr)
    other_store = args.standalone or args.rdzv_endpoint or args.rdzv_backend != 'static'
    if not single_host or other_store:
        return None
    args.master_addr = LOOPBACK
    store = loopback_store(DEFAULT_PORT if args.master_port is None else args.master_port)
    args.master_port = store.port
    return store


def _wait_for_name(args: Namespace) -> None:
    """Wait until the name of host 0 is known, which a pod may precede; PyTorch 1 does not wait."""
    place = meeting_point(args)
    if place is None:
        return
    deadline = time.monotonic() + meeting_timeout(args)
    while True:
        try:
            socket.getaddrinfo(*place)
            return
        except (OSError, UnicodeError) as error:
            if time.monotonic() >= deadline:
                name = 'the rendezvous' if args.rdzv_endpoint else 'MASTER_ADDR'
                raise LaunchError(
                    f'no host {place[0]!r}, which {name} names, is known: {error}. Expected the '
                    f'name or the address of host 0. Correct it, or start host 0.'
                ) from error
        time.sleep(1)


def describe_failure(error: ChildFailedError) -> str:
    """Name the rank that failed, in one line in place of torchrun's table and traceback.

    The rank that ended first may be one that stopped because of another.
    """
    failures = sorted(error.failures.items(), key=lambda item: item[1].timestamp)
    notes = {rank: _note_of(failure) for rank, failure in failures}
    for rank, failure in failures:
        if notes[rank] and not notes[rank].get('because_of_another'):
            return f'rank {rank} (pid {failure.pid}) failed: {notes[rank]["message"]}'
    # torchrun ends those that still run with SIGTERM, and 30 s later with SIGKILL: also one that
    # is stopped. Of a rank that was killed before, the others say that it is gone.
    noted = [note for note in notes.values() if note]
    hangs = bool(noted) and not any(note.get('gone') for note in noted)
    own = (signal.SIGTERM, signal.SIGKILL) if hangs else (signal.SIGTERM,)
    for rank, failure in failures:
        if failure.exitcode < 0 and -failure.exitcode not in own:
            return _ended(rank, failure)
    first = [one for one in failures if -one[1].exitcode not in own] or failures
    rank, failure = first[0]
    if all(notes[rank] for rank, _ in first):
        message = notes[rank]['message']
        return f'rank {rank} (pid {failure.pid}) stopped because of another: {message}'
    return _ended(rank, failure)


def _note_of(failure: Any) -> Dict[str, Any]:
    """Read what :func:`mmdevplug.fault_tolerance.abort.note_for_agent` wrote."""
    data = getattr(failure, 'error_file_data', None)
    return data if isinstance(data, dict) and 'because_of_another' in data else {}


def _ended(rank: int, failure: Any) -> str:
    how, look = f'ended with exit status {failure.exitcode}', 'its own message is above.'
    if failure.exitcode < 0:
        how = f'was ended by {failure.signal_name()}'
    if failure.exitcode == -signal.SIGKILL:
        look = (
            'SIGKILL leaves no message of its own; the other ranks, if any, say above where it '
            'was. The kernel sends it when memory runs out: look at its log (dmesg).'
        )
    return f'rank {rank} (pid {failure.pid}) {how} before the others; {look}'


def run_agent(argv: Optional[List[str]] = None, server: Optional[RankServer] = None) -> int:
    """Run torchrun until all ranks have ended, and return the exit status.

    Args:
        argv (list, optional): Its arguments. Defaults to None: those of this process.
        server (RankServer, optional): What to fork ranks from, if it can. Defaults to None.
    """
    os.environ[AGENT] = str(os.getpid())
    signals = RankSignals(server and server.pid)
    signals.install()
    start, popen = api.SubprocessContext._start, api.SubprocessHandler._popen

    def start_with_ours(context: Any) -> None:
        # PyTorch has just installed its own handlers.
        signals.install()
        start(context)

    def fork_or_start(handler: Any, args: Any, env: Dict[str, str]) -> Any:
        if server is None or not server.can_fork(args, env):
            return popen(handler, args, env)
        files = {1: handler._stdout, 2: handler._stderr}
        return server.fork(env, {number: file for number, file in files.items() if file})

    # Of its files of errors, which are ours; the last line of the job is what they say.
    logging.getLogger('torch.distributed.elastic.multiprocessing.errors').setLevel(
        logging.CRITICAL
    )
    patch_symbol(api.SubprocessHandler, '_popen', fork_or_start, _HANDLER)
    if not _CHOOSES_SIGNALS:
        patch_symbol(api.SubprocessContext, '_start', start_with_ours)
    status = 1
    words = sys.argv[1:] if argv is None else argv
    # torchrun leaves its own folder behind. Later words win.
    folder = tempfile.TemporaryDirectory(prefix='mmdevplug-')
    try:
        status = main([f'--log_dir={folder.name}', *words])
    except ChildFailedError as error:
        say(describe_failure(error))
    except SignalException:
        status = 1  # it came before or after `main`; the lines below report it
    finally:
        signals.closed = True
        if server is not None:
            server.close()
        end_leftovers()
        folder.cleanup()
    if signals.number is None:
        return status
    name = signal.Signals(signals.number).name
    well = status == 0 or signals.ended_well
    how = 'each with status 0.' if well else 'not all of them with status 0.'
    say(f'ended by {name}; all ranks of this host ended, {how}')
    return exit_status(signals.number)


if __name__ == '__main__':
    sys.exit(run_agent())
