"""Ends training in good order when a scheduler takes the machine away."""

import os
import signal
import threading
import time
from typing import Any, Dict, Optional, Sequence

from mmengine.hooks import CheckpointHook, Hook
from mmengine.registry import HOOKS

from mmdevplug.dist import device_context, enter_phase, wait_for_everyone
from mmdevplug.dist.stopping import StopAgreement

#: Schedulers signal every process of a job, and torchrun passes the signal on: within so many
#: seconds a second one is the same notice.
SAME_NOTICE_SECONDS = 3.0


@HOOKS.register_module()
class PreemptionHook(Hook):
    """Saves a checkpoint and ends with exit status 0 when a signal asks for it.

    A signal to any rank makes all ranks finish the same iteration, save through the checkpoint
    hook and end. A second SIGTERM ends the process at once.

    Args:
        signals (Sequence[str]): Defaults to SIGTERM, and SIGUSR1, which Slurm sends ahead of time
            if it is asked to (``--signal=USR1@120``).

    Examples:
        >>> custom_hooks = [dict(type='PreemptionHook')]
    """

    priority = 'LOWEST'

    def __init__(self, signals: Sequence[str] = ('SIGTERM', 'SIGUSR1')) -> None:
        self._signals = [getattr(signal, name) for name in signals]
        self._handlers: Dict[int, Any] = {}
        self._agreement: Optional[StopAgreement] = None
        self._terminated = 0.0  # when the first SIGTERM came
        self._pid = 0

    def before_train(self, runner: Any) -> None:
        """Take over the signals; see :class:`mmengine.hooks.Hook`."""
        self._agreement, self._terminated = StopAgreement(), 0.0
        if threading.current_thread() is not threading.main_thread():
            return  # Python handles signals in the main thread alone.
        self._pid = os.getpid()
        for number in self._signals:
            self._handlers[number] = signal.signal(number, self._on_signal)

    def after_train(self, runner: Any) -> None:
        """Give the signals back; see :class:`mmengine.hooks.Hook`."""
        self.restore()

    def restore(self) -> None:
        """Put back the handlers that were there before."""
        for number, handler in self._handlers.items():
            # None is a handler that was not set from Python.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._handlers.clear()

    def _on_signal(self, number: int, _: Any) -> None:
        if os.getpid() != self._pid:
            return  # in a worker of a data loader, which its training process ends
        now = time.monotonic()
        if number == signal.SIGTERM and self._terminated:
            if now - self._terminated < SAME_NOTICE_SECONDS:
                return
            self.restore()
            os.kill(os.getpid(), number)
            return
        if number == signal.SIGTERM:
            self._terminated = now
        context = device_context()
        where = f' to {context.env.describe()}' if context is not None else ''
        if self._agreement is not None:
            self._agreement.request(f'{signal.Signals(number).name}{where}')

    def after_train_iter(
        self,
        runner: Any,
        batch_idx: int,
        data_batch: Any = None,
        outputs: Optional[dict] = None,
    ) -> None:
        """Stop if all have agreed on this iteration; see :class:`mmengine.hooks.Hook`.

        Raises:
            SystemExit: With status 0, after a checkpoint has been saved.
        """
        interval = getattr(runner.optim_wrapper, '_accumulative_counts', 1)
        if self._agreement is not None and self._agreement.reached(runner.iter + 1, interval):
            self._stop(runner, self._agreement.why)

    def _stop(self, runner: Any, why: str) -> None:
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
        raise SystemExit(0)


def save_now(runner: Any) -> Optional[str]:
    """Save a checkpoint at the end of an iteration, through the runner's checkpoint hook.

    Args:
        runner (Runner): The runner.

    Returns:
        str or None: Where; None without such a hook, or if saving failed and is allowed to.
    """
    for hook in runner.hooks:
        if not isinstance(hook, CheckpointHook):
            continue
        if hasattr(hook, 'save_now'):
            return hook.save_now(runner)
        iteration, template = runner.iter + 1, hook.filename_tmpl
        # A name with an epoch's number would say that the epoch was finished.
        hook.filename_tmpl = 'iter_{}.pth'
        try:
            meta = dict(epoch=runner.epoch, iter=iteration)
            hook._save_checkpoint_with_step(runner, iteration, meta=meta)
        finally:
            hook.filename_tmpl = template
        return os.path.join(hook.out_dir, f'iter_{iteration}.pth')
    return None
