"""Start the ranks of this host with PyTorch's ``elastic_launch``, and say how they ended."""

import argparse
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import replace
from multiprocessing import forkserver
from types import FrameType
from typing import Callable, List, Optional, TypeVar

import psutil

from mmdevplug.config.accelerator import AcceleratorOptions
from mmdevplug.config.launch_options import COUNTED, LaunchOptions
from mmdevplug.environments import starting
from mmdevplug.environments.loopback import addresses_between, loopback_store
from mmdevplug.environments.torchrun import AGENT, ELASTIC
from mmdevplug.errors import LaunchError, first_line
from mmdevplug.fault_tolerance.ended_ranks import describe_end, silence_torchrun
from mmdevplug.utils.host import memory_kills, usable_cores
from mmdevplug.utils.signals import SIGNALS, follow_signals

from . import say
from .common import load_config
from .hosts import LAUNCH_FLAGS, read_job
from .ranks import run_rank
from .result_queues import send_one_by_one

Answer = TypeVar('Answer')
#: How long ranks may take to save and end after a signal, where PyTorch leaves that open.
SAVE_SECONDS = 300
#: How long a signal may wait for Python, while PyTorch waits for other hosts.
STUCK_SECONDS = 0.5
#: How long processes that are killed may take, in which they may still write.
KILL_SECONDS = 5.0


def launch(module: str, argv: List[str], args: argparse.Namespace) -> None:
    """Run ``main`` of a module in the ranks of this host; ``args`` are ``argv`` parsed.

    Raises:
        SystemExit: If one of them has not ended with status 0.
    """
    settings = read_job(args)
    counted = settings.nproc in COUNTED
    _check_semaphores()
    _set_variables(settings, args.verbose)
    method = _start_server()
    from mmdevplug.accelerators.detection import is_missing  # imports PyTorch, as the server does

    if args.accelerator and is_missing(args.accelerator):
        _in_a_process(method, _choose_for_job, args)
    if not (counted or args.oversubscribe):
        starting.check_room(int(settings.nproc or 1), say)
    with tempfile.TemporaryDirectory(prefix='mmdevplug-') as folder:
        if counted:
            settings = replace(settings, nproc=_count(settings.nproc, method, args))
        words = [*starting.without_options(argv, LAUNCH_FLAGS), '--launcher', 'pytorch']
        if settings.elastic and 'resume' in args:
            words += _resume_always(args)
        status = _run_ranks(settings, method, folder, args.verbose, module, words)
    if status:
        raise SystemExit(status)


def _resume_always(args: argparse.Namespace) -> List[str]:
    """Let ranks resume each time they start: PyTorch counts no hosts that come or go."""
    if args.resume not in (None, 'auto'):
        raise LaunchError(
            f'--resume {args.resume} and --nnodes {args.nnodes} disagree: where hosts join and '
            f'leave, each start goes on from the newest checkpoint of the work directory. Leave '
            f'the path out, and copy the checkpoint there.'
        )
    say('hosts may join and leave: ranks resume from the newest checkpoint, if there is one.')
    return [] if args.resume else ['--resume']


def _run_ranks(
    settings: LaunchOptions, method: str, folder: str, verbose: bool, module: str, argv: List[str]
) -> int:
    """Run the ranks until they end; return the exit status of the command."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousError
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, parse_args

    _Signals(folder)
    store = None
    if not settings.several_hosts:
        # By itself PyTorch's store listens on every interface, and answers whoever connects.
        port, store = loopback_store(settings.master_port or 0)
        settings = replace(settings, master_port=port)
    words = starting.torchrun_options(settings)
    words += [f'--log_dir={folder}', '--monitor_interval=0.1', module]
    config, *_ = config_from_args(parse_args(words))
    config.start_method = method
    if hasattr(config, 'shutdown_timeout'):  # PyTorch 2.13
        config.shutdown_timeout = SAVE_SECONDS
    if not verbose:
        silence_torchrun(say if config.max_restarts else None)
    others = set(multiprocessing.active_children())  # of a script that calls this
    kills, sending, well = memory_kills(), send_one_by_one(), False
    try:
        if settings.elastic:
            here, host = addresses_between(str(settings.master_addr))
            config.rdzv_configs['is_host'] = here == host  # PyTorch compares names alone
            if hasattr(config, 'local_addr'):  # PyTorch 2
                config.local_addr = here  # in place of a name that other hosts may not know
        try:
            try:
                elastic_launch(config, run_rank)(module, argv)
            except RendezvousConnectionError:
                if not config.rdzv_configs.get('is_host'):
                    raise
                # Another command of this host, or a pod on it, has opened the port before.
                config.rdzv_configs['is_host'] = False
                elastic_launch(config, run_rank)(module, argv)
            well = True
        finally:
            # What PyTorch has not waited for, after a signal while it starts ranks or a third one.
            for process in set(multiprocessing.active_children()) - others:
                process.kill()
                process.join()
            if not well:
                _end_what_is_left()
            sending.restore()
    except ChildFailedError as error:
        status, text = describe_end(error, folder, kills)
        say(text)
        return status
    except SignalException as error:
        say(f'ended by {signal.Signals(error.sigval).name}.')
        return 128 + error.sigval
    except (RendezvousError, RuntimeError, OSError) as error:
        if not settings.several_hosts:
            raise
        raise LaunchError(
            f'this host cannot meet the others at {config.rdzv_endpoint}: '
            f'{first_line(error)}. Expected {settings.nnodes} hosts to be started with this '
            f'address. Look at what host 0 prints, and at a firewall; a job that has ended takes '
            f'no more hosts: start it again on all of them, with --resume.'
        ) from error
    del store
    return 0


def _end_what_is_left() -> None:
    """End processes of this job that PyTorch does not know, such as workers of loaders that hang.

    These have the variables of the job and the session of this command, which is not their parent:
    the server that ranks are forked from is its child.
    """
    command, session, killed = os.getpid(), os.getsid(0), []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # it has ended, or is another user's
            if command in (process.pid, process.ppid()) or os.getsid(process.pid) != session:
                continue
            if process.environ().get(AGENT) == str(command):
                process.kill()
                killed.append(process)
    psutil.wait_procs(killed, timeout=KILL_SECONDS)


class _Signals:
    """End this command at a signal, also while PyTorch waits for other hosts.

    Python calls a handler when a call into PyTorch returns, which may take as long as the hosts
    may take to come. The kernel wakes a thread at once.
    """

    def __init__(self, folder: str) -> None:
        self._folder, self._seen = folder, False
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._end)
            elif number == signal.SIGHUP:  # under nohup, which PyTorch overrides
                signal.pthread_sigmask(signal.SIG_BLOCK, [number])
        self._unfollow = follow_signals(self._look)

    def _end(self, number: int, _: Optional[FrameType]) -> None:
        from torch.distributed.elastic.multiprocessing.api import SignalException

        self._seen = True
        raise SignalException('', sigval=signal.Signals(number))

    def _look(self, number: int) -> None:
        # Once ranks run, PyTorch has handlers of its own, and waits in Python.
        ours = number in SIGNALS and signal.getsignal(number) == self._end
        if not ours:
            return
        time.sleep(STUCK_SECONDS)
        if self._seen:
            return
        say(f'ended by {signal.Signals(number).name}.')
        for process in multiprocessing.active_children():
            process.kill()
        shutil.rmtree(self._folder, ignore_errors=True)
        os._exit(128 + number)


# before ------------------------------------------------------------------------------------------


def _set_variables(settings: LaunchOptions, verbose: bool) -> None:
    """Set what the processes that are started inherit."""
    os.environ[AGENT] = str(os.getpid())
    # PyTorch and MMEngine would do so, with a warning of several lines from each.
    threads = usable_cores() if settings.nproc == 1 else 1
    for name in ('OMP_NUM_THREADS', 'MKL_NUM_THREADS'):
        os.environ.setdefault(name, str(threads))
    os.environ.setdefault('PYTHONUNBUFFERED', '1')
    # With NVML MMEngine asks for CUDA devices without initializing CUDA.
    os.environ.setdefault('PYTORCH_NVML_BASED_CUDA_CHECK', '1')
    if not verbose:
        # Or PyTorch's store prints 20 frames of C++ for each call that fails, which we report.
        os.environ.setdefault('TORCH_CPP_LOG_LEVEL', 'ERROR')
    if settings.elastic:
        os.environ[ELASTIC] = '1'
        # PyTorch from 2.4 on would keep the place where the ranks of an earlier round met.
        os.environ['TORCH_DISABLE_SHARE_RDZV_TCP_STORE'] = '1'


def _check_semaphores() -> None:
    """Refuse to start processes where there is no place for PyTorch's semaphores."""
    try:
        multiprocessing.Lock()
    except OSError as error:
        raise LaunchError(
            f'/dev/shm: {error.strerror}. PyTorch starts ranks with semaphores there, and workers '
            f'of data loaders share batches there. Mount it writable (docker run --shm-size=8g; '
            f'in a pod an emptyDir with medium: Memory), or start one process: leave --nproc out.'
        ) from error


def _start_server() -> str:
    """Choose how processes are started; start the process that they are forked from."""
    reason = starting.why_not_forked()
    if reason is not None:
        say(f'ranks are not forked from one process, because {reason}: the start takes longer.')
        return 'spawn'
    multiprocessing.set_forkserver_preload(['mmdevplug.cli.preload'])
    # It inherits the mask: a signal to all processes of a job must not end it before its ranks.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    forkserver.ensure_running()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    return 'forkserver'


def _in_a_process(method: str, function: Callable[..., Answer], *arguments: object) -> Answer:
    """Call in a process of its own: looking at some devices takes hold of them."""
    with ProcessPoolExecutor(1, multiprocessing.get_context(method)) as pool:
        return pool.submit(function, *arguments).result()


def _count(word: object, method: str, args: argparse.Namespace) -> int:
    return _in_a_process(method, _count_for_job, word, args)


def _choose_for_job(args: argparse.Namespace) -> str:
    """Choose the accelerator of the job's config, and return its name."""
    from mmdevplug.accelerators import choose_accelerator

    options = AcceleratorOptions.from_config(load_config(args).get('accelerator'))
    return choose_accelerator(options.device).accelerator.name


def _count_for_job(word: str, args: argparse.Namespace) -> int:
    """Count the processes that ``auto``, ``gpu`` or ``cpu`` stand for with the job's config."""
    from mmdevplug.accelerators import choose_accelerator
    from mmdevplug.accelerators.counting import count_devices

    options = AcceleratorOptions.from_config(load_config(args).get('accelerator'))
    return count_devices(word, choose_accelerator(options.device).accelerator)
