"""Answer other ranks from a thread that needs no interpreter lock: a busy process is not dead.

The thread that beats needs the interpreter's lock, which vendors' compilers hold: for minutes in a
first compilation on a lazy device. Before a silent rank counts as dead it is asked, and a C++
thread answers, which needs no lock: that of a small ``TCPStore`` which each rank holds for this.

An answer proves what a beat proves: the process runs, and its host and the link to it are up. A
process that has ended or was stopped (SIGSTOP), or whose host is down, does not answer. Neither
proves that the main thread makes progress; a rank that holds the lock for ever is found when the
collective that the others wait in times out.
"""

import json
import logging
import socket
import threading
from datetime import timedelta
from typing import Any, Iterable, List, Optional, Tuple

from torch import distributed as torch_dist

from mmdevplug.environments.launch_variables import LaunchEnv
from mmdevplug.environments.loopback import LOOPBACK, is_loopback, loopback_store
from mmdevplug.errors import LaunchError
from mmdevplug.utils.torch_compat import get_text, set_text

from . import abort
from .heartbeat import STOPPED

#: How long a process that lives may take to answer; it has nothing else to do.
ANSWER_SECONDS = 5.0

_STOPPED_TEXT = (
    'the process is stopped (SIGSTOP, a debugger, a frozen container) and answers nobody; let it '
    'go on with `kill -CONT PID`, or end it'
)
_UNREACHABLE = 'its host or the link to it is down'
GONE = (
    f'{abort.GONE}. It was killed (out of memory, SIGKILL) or its host is down; look at the end '
    f'of its log and at the kernel log of its host'
)


class LivenessCheck:
    """Answer for this rank, and ask others."""

    def __init__(self, store: 'torch_dist.Store', env: LaunchEnv) -> None:
        self._store = store
        self._held: Any = None
        place: Optional[Tuple[str, int]] = None
        wait = timedelta(seconds=ANSWER_SECONDS)
        try:
            reached_at, listens_at = _addresses(env)
            port, self._held = loopback_store(0, listens_at, wait)
            if self._held is None:
                # An older PyTorch opens the port by itself.
                self._held = torch_dist.TCPStore(
                    listens_at, port, is_master=True, timeout=wait, wait_for_workers=False
                )
            place = reached_at, port
        except (OSError, RuntimeError, LaunchError) as error:
            # Without a port only its beats show that this rank is alive.
            logging.getLogger(__name__).debug('no port to answer at: %s', error)
        set_text(store, f'answers/{env.rank}', json.dumps(place))

    def ask(self, ranks: Iterable[int]) -> List[int]:
        """Ask ranks that have beaten at least once, all together; return those that answer."""
        places = {rank: json.loads(get_text(self._store, f'answers/{rank}')) for rank in ranks}
        answered: List[int] = []
        asking = [
            threading.Thread(target=_ask, args=(rank, *place, answered), daemon=True)
            for rank, place in places.items()
            if place is not None
        ]
        for thread in asking:
            thread.start()
        for thread in asking:
            # A stopped process accepts connections and never answers; its thread is abandoned.
            thread.join(ANSWER_SECONDS)
        return sorted(answered)

    def why_silent(self, rank: int, state: str) -> str:
        """Say what a rank that does not answer suffers from, as far as this host can know.

        ``state`` is that of its process, '' on another host. The system takes connections to a
        process that is stopped.
        """
        if state == STOPPED:
            return _STOPPED_TEXT
        place = json.loads(get_text(self._store, f'answers/{rank}')) if state == '' else None
        if place is None:
            return GONE
        try:
            socket.create_connection(tuple(place), ANSWER_SECONDS).close()
        except ConnectionRefusedError:
            return GONE
        except OSError:
            return _UNREACHABLE
        return _STOPPED_TEXT


def _ask(rank: int, address: str, port: int, answered: List[int]) -> None:
    wait = timedelta(seconds=ANSWER_SECONDS)
    try:
        store = torch_dist.TCPStore(address, port, timeout=wait, wait_for_workers=False)
        store.add('asked', 1)
    except RuntimeError as error:
        logging.getLogger(__name__).debug('rank %d does not answer: %s', rank, error)
    else:
        answered.append(rank)


def _addresses(env: LaunchEnv) -> Tuple[str, str]:
    """Return the address at which others reach this host, and the one to listen at."""
    if env.single_host and is_loopback(env.master_addr):
        return LOOPBACK, LOOPBACK
    kind = socket.SOCK_DGRAM
    family, _, _, _, master = socket.getaddrinfo(env.master_addr, env.master_port, type=kind)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(master)  # sends nothing; the system chooses the address of this end
        own = probe.getsockname()[0]
    if not is_loopback(own):
        return own, own
    # The host of rank 0 may have its own name on the loopback interface.
    return env.master_addr, '::' if family == socket.AF_INET6 else '0.0.0.0'
