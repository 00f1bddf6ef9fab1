"""Continue training at the checkpoint: loops, random states, and a validation that was due."""

from typing import Any, Callable, List, Mapping, Optional, Union

from mmengine.dist import get_world_size
from mmengine.hooks import Hook
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop

from mmdevplug.data.resumable_loader import PLACEHOLDER, Reading, ResumableLoader
from mmdevplug.utils.annotations import AnyLoop, AnyRunner
from mmdevplug.utils.logs import log_warning
from mmdevplug.utils.loops import loader_of, progress_of, validation_follows
from mmdevplug.utils.model import accumulative_counts

from .participants import Participants, RandomStates, RankBuffers, keeps_state
from .plain_state import PlainState


class Progress:
    """Continue the training of a runner whose participants were restored.

    Args:
        runner (Runner): Before training begins.
        ranks (int): Of the checkpoint.
        buffers (RankBuffers): Of the runner.
        random (RandomStates): With the states to restore.
    """

    def __init__(
        self, runner: AnyRunner, ranks: int, buffers: RankBuffers, random: RandomStates
    ) -> None:
        self.runner, self._random = runner, random
        given_loader = loader_of(runner.train_loop)
        loader = given_loader if isinstance(given_loader, ResumableLoader) else None
        resumed_at = None if loader is None else loader.resumed_at
        self._undo: List[Callable[[], object]] = []
        #: Whether random states are restored before the next epoch begins.
        self._between_epochs = resumed_at is None
        inexact = [getattr(loader, 'inexact', ''), buffers.inexact]
        if ranks != get_world_size():
            inexact.insert(
                0, f'the checkpoint is of {ranks} rank(s) and this job has {get_world_size()}'
            )
        loop, counts = runner.train_loop, accumulative_counts(runner.optim_wrapper)
        done, last = progress_of(loop) or (0, 1)
        if runner.iter % counts and done < last:
            inexact.append(
                f'the checkpoint is in the middle of accumulative_counts={counts}, and gradients '
                f'of {runner.iter % counts} iteration(s) were not saved'
            )
        self._endless: object = getattr(loop, 'dataloader_iterator', None)
        # A loader without a saved position starts again, and MMEngine's loop then skips the
        # batches that were trained on. Ours continues, so the loop gets placeholders to skip.
        if isinstance(loop, IterBasedTrainLoop) and (loader is None or loader.has_place):
            reading = getattr(self._endless, '_iterator', None)
            if hasattr(self._endless, 'skip_iter'):  # OneDL's
                vars(self._endless)['skip_iter'] = lambda num_iters: None
            elif isinstance(reading, Reading) and getattr(loop, 'runs_as_mmengine', False):
                _give_placeholders(loop, reading)
        if loader is not None and resumed_at is not None:
            loader.before_next = random.restore
            if isinstance(loop, EpochBasedTrainLoop) and resumed_at:
                # Hooks get the true index of each batch in the epoch that was interrupted.
                run_iter, epoch = loop.run_iter, loop.epoch
                loop.run_iter = lambda index, batch: run_iter(
                    index + resumed_at if loop.epoch == epoch else index, batch
                )
        if any(inexact):
            log_warning(
                f'Resuming, but not exactly: {"; ".join(filter(None, inexact))}. Results, and '
                f'maybe random numbers and the order of the data, differ from those of an '
                f'uninterrupted run.'
            )

    def before_epoch(self, *parts: Union[PlainState, Participants]) -> None:
        """Restore random states, or note those of parts when ``before_train_epoch`` begins.

        In the middle of an epoch hooks have been called already: :meth:`after_repeating` undoes
        what they count and draw once more. What they do in ``before_train`` stays, which some of
        them have not come to yet.
        """
        if self._between_epochs:
            self._random.restore()
            return
        first: Any = self.runner.hooks[0]
        # A hook may hold a function of its own there, which must be called and stay.
        own = vars(first).get('before_train_epoch')

        def note(runner: AnyRunner) -> None:
            del vars(first)['before_train_epoch']
            if own is not None:
                first.before_train_epoch = own
            self._undo = [part.keep() for part in parts]
            first.before_train_epoch(runner)

        first.before_train_epoch = note

    def after_repeating(self) -> None:
        """Restore the attributes that hooks changed when they were called a second time."""
        while self._undo:
            self._undo.pop()()

    def check_batches(self) -> None:
        """Say that a loop over iterations has dropped batches that were not trained on."""
        reading = getattr(self._endless, '_iterator', None)
        if isinstance(reading, Reading) and reading.taken > 1:
            loop = type(self.runner.train_loop).__name__
            log_warning(
                f'Resuming, but not exactly: {loop}.run() has dropped {reading.taken - 1} batches '
                f'before its first iteration, as for a loader that begins anew, but ours goes on '
                f'where it was. Remove that from {loop}, or let it call super().run().'
            )

    def validate_if_due(self) -> None:
        """Validate if the checkpoint was saved before the validation that was due."""
        by_epoch = isinstance(self.runner.train_loop, EpochBasedTrainLoop)
        if not validation_follows(self.runner) or (by_epoch and not self._between_epochs):
            return
        self.runner.logger.info(
            'Validating first: the checkpoint was saved before the validation that followed, and '
            'has no results of it.'
        )
        # Validation draws random numbers too, and training goes on after them.
        self._random.restore()
        self.runner.val_loop.run()
        self._random.state_dict(renew=False)


def _give_placeholders(loop: AnyLoop, reading: Reading) -> None:
    """Give placeholders for the batches that were trained on, to a loop that may drop them.

    MMEngine's drops them since 0.10.3. Earlier ones, and forks of them under other numbers, train
    on what comes first: the batch that follows takes the place of their first placeholder.
    """
    reading.placeholders, run_iter = loop.iter, loop.run_iter

    def run_with_data(batch: object) -> None:
        if batch is PLACEHOLDER:
            reading.placeholders = 0
            batch = next(loop.dataloader_iterator)
        run_iter(batch)

    vars(loop)['run_iter'] = run_with_data


def repeat_validation(
    runner: AnyRunner, checkpoint_hook: Hook, metrics: Optional[Mapping[str, object]]
) -> None:
    """Call ``after_val_epoch`` of the hooks whose turn came after the checkpoint was saved."""
    hooks = runner.hooks
    if metrics is None:
        return
    for hook in hooks[hooks.index(checkpoint_hook) + 1 :]:
        if keeps_state(hook):
            hook.after_val_epoch(runner, metrics=dict(metrics))
