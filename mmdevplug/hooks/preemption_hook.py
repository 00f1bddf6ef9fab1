"""Save and stop when a scheduler takes the machine away."""

import os
import signal
import threading
import time
from typing import Any, Callable, Dict, Optional

from mmengine.hooks import CheckpointHook, Hook
from mmengine.registry import HOOKS

from mmdevplug.accelerators import context_of
from mmdevplug.distributed.waiting import wait_for_everyone
from mmdevplug.environments.torchrun import AGENT, ELASTIC
from mmdevplug.fault_tolerance.failure import current_watch, enter_phase
from mmdevplug.fault_tolerance.stop_together import StopAgreement
from mmdevplug.utils.annotations import AnyRunner
from mmdevplug.utils.model import accumulative_counts
from mmdevplug.utils.signals import follow_signals

#: How long the agent of a host may take to notice that others have come, and to signal its ranks:
#: with PyTorch 1 it looks every 5 s.
AGENT_SECONDS = 15.0
#: Schedulers signal every process of a job, and the agent passes the signal on, too. A second
#: signal within this time, in seconds, counts as the same notice.
SAME_NOTICE_SECONDS = 3.0
#: How long a handler may wait for the main thread before that thread is woken.
HANDLED_SECONDS = 0.2
#: SIGUSR1 is what Slurm sends ahead of time if it is asked to (``--signal=USR1@120``).
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


@HOOKS.register_module()
class PreemptionHook(Hook):
    """Save a checkpoint and end when a signal asks for it.

    A signal to any rank makes all ranks finish the same iteration, save through the checkpoint
    hook and end. Ranks end with status 0, so that no launcher starts them again; in an elastic job
    those of the other hosts are started again, and train on without this one. A single process,
    and a rank of ``mmdevplug train`` that got the signal, ends with the status that shells give to
    the signal, 143 for SIGTERM. A second SIGTERM, SIGINT or SIGHUP ends the process at once.
    """

    priority = 'LOWEST'

    def __init__(self) -> None:
        self._handlers: Dict[int, Any] = {}
        self._agreement: Optional[StopAgreement] = None
        self._asked: Optional[int] = None  # the first signal
        self._asked_to_end = 0.0  # time of the first signal other than SIGUSR1
        self._pid = 0
        self._handled = 0.0  # time of the newest call of the handler
        self._unfollow: Optional[Callable[[], None]] = None

    def before_train(self, runner: AnyRunner) -> None:
        """Install the signal handlers."""
        self._agreement, self._env = StopAgreement(current_watch()), context_of(runner).env
        if threading.current_thread() is not threading.main_thread():
            return  # Python handles signals in the main thread alone.
        self._pid = os.getpid()
        self._asked, self._asked_to_end = None, 0.0
        for number in SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # as by `nohup`
            self._handlers[number] = signal.signal(number, self._on_signal)
        if self._handlers:
            self._unfollow = follow_signals(self._wake)

    def after_train(self, runner: AnyRunner) -> None:
        """Put back the handlers that were there before."""
        self._put_back()

    def end_training(self) -> None:
        """Put them back after an error, too, where the process may go on, as a notebook does.

        A rank of a job ends with its error, and no signal must end it before it has said so.
        """
        if self._handlers and self._env.launcher == 'none':
            self._put_back()

    def _put_back(self) -> None:
        for number, handler in self._handlers.items():
            # None is a handler that was not set from Python.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._handlers.clear()
        if self._unfollow is not None:
            self._unfollow()
            self._unfollow = None

    def _wake(self, number: int) -> None:
        """Interrupt the main thread if a signal has reached another one."""
        arrived = time.monotonic()
        time.sleep(HANDLED_SECONDS)
        # The handler may have begun before this thread did.
        if number in self._handlers and self._handled < arrived - HANDLED_SECONDS:
            signal.pthread_kill(threading.main_thread().ident or 0, number)

    def _on_signal(self, number: int, _: object) -> None:
        if os.getpid() != self._pid:
            return  # in a worker of a data loader, which its training process ends
        self._handled = time.monotonic()  # no Event: another signal may interrupt its lock
        if number != signal.SIGUSR1:
            now = time.monotonic()
            if self._asked_to_end:
                if now - self._asked_to_end >= SAME_NOTICE_SECONDS:
                    handler = self._handlers.pop(number)
                    signal.signal(number, signal.SIG_DFL if handler is None else handler)
                    os.kill(os.getpid(), number)
                return
            self._asked_to_end = now
        self._asked = self._asked or number
        where = f' to {self._env.describe()}'
        if self._agreement is not None:
            self._agreement.request(f'{signal.Signals(number).name}{where}')

    def after_train_iter(self, runner: AnyRunner, *args: object, **kwargs: object) -> None:
        """Stop if all ranks have agreed on this iteration.

        Raises:
            SystemExit: After a checkpoint has been saved.
            KeyboardInterrupt: Instead, after SIGINT to a single process.
        """
        interval = accumulative_counts(runner.optim_wrapper)
        if self._agreement is not None and self._agreement.reached(runner.iter + 1, interval):
            self._stop(runner, str(self._agreement.why))

    def _stop(self, runner: AnyRunner, why: str) -> None:
        enter_phase(f'saving a checkpoint after {why}')
        path = save_now(runner)
        runner.call_hook('after_train')
        enter_phase(f'ending after {why}')
        wait_for_everyone('ending')
        saved = (
            'no checkpoint, because there is no CheckpointHook'
            if path is None
            else f'{path}. To go on, start the same command with --resume'
        )
        runner.logger.info(
            f'Stopped after iteration {runner.iter + 1} because of {why}; saved {saved}.'
        )
        if ELASTIC in os.environ:
            self._leave_elastic_job()
        launched = self._env.launcher != 'none'
        # PyTorch would wait for more of a rank of our command that ends with status 0.
        if self._asked is None or (launched and AGENT not in os.environ):
            raise SystemExit(0)
        if self._asked == signal.SIGINT and not launched:
            raise KeyboardInterrupt
        raise SystemExit(128 + self._asked)

    def _leave_elastic_job(self) -> None:
        """Let the agent start this rank again if another host was asked to end, or has come.

        Raises:
            SystemExit: With a status that is a failure for torchrun, which takes 0 for the end of
                training.
        """
        deadline = time.monotonic() + AGENT_SECONDS
        while self._asked is None and time.monotonic() < deadline:
            time.sleep(0.05)
        if self._asked is None:
            raise SystemExit(os.EX_TEMPFAIL)


def save_now(runner: AnyRunner) -> Optional[str]:
    """Save at the end of an iteration through the checkpoint hook; None if there is none."""
    hook = next((each for each in runner.hooks if isinstance(each, CheckpointHook)), None)
    if hook is None:
        return None
    if hasattr(hook, 'save_now'):
        return hook.save_now(runner)
    iteration, template = runner.iter + 1, hook.filename_tmpl
    # A name with an epoch's number would mean that the epoch was finished.
    hook.filename_tmpl = 'iter_{}.pth'
    try:
        meta = dict(epoch=runner.epoch, iter=iteration)
        hook._save_checkpoint_with_step(runner, iteration, meta=meta)
    finally:
        hook.filename_tmpl = template
    return os.path.join(hook.out_dir, f'iter_{iteration}.pth')
