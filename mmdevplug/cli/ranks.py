"""Run one rank of a job: what PyTorch calls in each process that it has started."""

import atexit
import multiprocessing
import os
import shutil
import signal
import sys
from importlib import import_module
from pathlib import Path
from typing import List, Union

from mmdevplug.fault_tolerance.abort import note_for_agent
from mmdevplug.fault_tolerance.ended_ranks import end_without_command
from mmdevplug.utils.signals import SIGNALS, start_thread
from mmdevplug.utils.warnings_once import show_warnings_once

from .common import run


def run_rank(module: str, argv: List[str]) -> None:
    """Run ``main(argv)`` of a module.

    Raises:
        SystemExit: With its exit status, if that is not 0.
    """
    multiprocessing.set_start_method(None, force=True)  # which the fork server's has become
    sys.excepthook = sys.__excepthook__  # likewise
    # A shell that starts a job in the background ignores this one.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Those of the server; a signal that came since the fork is delivered now.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    parent = os.getppid()
    start_thread(end_without_command, 'mmdevplug-command', (parent,))
    # As at their import; Python's generator is seeded by the fork.
    import_module('numpy').random.seed()
    import_module('torch').default_generator.seed()
    # The server's, for matplotlib where HOME cannot be written to, and what runs in any case.
    atexit.unregister(shutil.rmtree)
    atexit.unregister(multiprocessing.util._exit_function)  # type: ignore[attr-defined]
    sys.argv = [sys.argv[0], *argv]
    if '--verbose' not in argv:
        # A folder of this host's job since its last restart.
        show_warnings_once(Path(os.environ['TORCHELASTIC_ERROR_FILE']).parents[1])
    try:
        status: Union[None, int, str] = run(import_module(module).main, argv)
    except SystemExit as ended:
        status = ended.code
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    except Exception as error:
        note_for_agent(error)
        sys.excepthook(*sys.exc_info())
        status = 1
    finally:
        atexit._run_exitfuncs()  # which multiprocessing leaves out before Python 3.12
    if os.getppid() != parent:
        os._exit(1)  # nobody waits, and multiprocessing's folder for temporary files is gone
    # PyTorch waits for a value of a rank that ends well.
    if status:
        sys.exit(status)
