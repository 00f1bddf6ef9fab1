"""All that a run saves and restores to go on where it was: one object for each runner."""

import copy
from contextlib import contextmanager
from typing import TYPE_CHECKING, Dict, Iterator, Mapping, Optional

from mmengine.hooks import Hook

from mmdevplug.patches.torch_load import last_read
from mmdevplug.utils.annotations import AnyRunner, Checkpoint, SavedState, StateDict, Stateful
from mmdevplug.utils.loops import validation_follows

from . import participants
from .best import NUMBERS
from .check_types import check_types
from .load_model import adapt_to_hooks, explaining_other_run
from .participants import Participants, RandomStates, RankBuffers
from .plain_state import PlainState
from .resumed_progress import Progress, repeat_validation

if TYPE_CHECKING:
    from .resume_settings import ResumeSettings


class Resume:
    """Resume a run from an earlier one, and collect what the next run needs to resume.

    A DeviceRunner has one; the first checkpoint hook of a stock runner makes it. The first
    checkpoint hook says when something happens.
    """

    #: Compares the settings of the checkpoint with those of the config, while it is loaded.
    _settings: 'ResumeSettings'

    def __init__(self) -> None:
        #: The checkpoint hook that is called first.
        self.first: Optional[Hook] = None
        #: The checkpoint that is being loaded to resume from.
        self.file: Optional[str] = None
        self.participants = Participants()
        self._random = RandomStates()
        #: Plain attributes of the model and of hooks; None until training begins.
        self._plain: Optional[PlainState] = None
        self._buffers: Optional[RankBuffers] = None
        #: The config of the schedulers, which MMEngine replaces by the built ones.
        self.scheduler_config: object = None
        #: The number of ranks of the checkpoint, until training begins.
        self._ranks = 0
        self._progress: Optional[Progress] = None
        #: Whether the validation that follows was done; None before anything was trained.
        self.validated: Optional[bool] = None
        #: Whether a checkpoint was saved since the last iteration.
        self._saved_here = False
        #: Metrics of the last validation, while ``after_val_epoch`` of hooks is called.
        self.metrics: Optional[Dict[str, object]] = None
        #: The states of all ranks, while a checkpoint is saved.
        self._states: Optional[StateDict] = None

    @classmethod
    def of(cls, runner: AnyRunner, hook: Hook) -> 'Resume':
        """Return that of a runner, which a checkpoint hook shares from now on."""
        found = getattr(runner, 'resume_state', None)
        if found is None:
            shared = [getattr(each, '_resume_state', None) for each in runner.hooks]
            found = next(each for each in [*shared, cls()] if isinstance(each, cls))
        if found.first is None:
            found.first = hook
        return found

    def note_schedulers(self, config: object) -> None:
        """Keep the config that schedulers are built from first."""
        if self.scheduler_config is None:
            self.scheduler_config = copy.deepcopy(config)

    # loading ------------------------------------------------------------------------------------

    @contextmanager
    def resuming(self, runner: AnyRunner, filename: str) -> Iterator[None]:
        """Compare and set settings around MMEngine's ``resume``, with optimizers as built."""
        from .resume_settings import ResumeSettings

        runner.optim_wrapper = runner.build_optim_wrapper(runner.optim_wrapper)
        if runner.param_schedulers is not None:
            self.note_schedulers(runner.param_schedulers)
            runner.param_schedulers = runner.build_param_scheduler(runner.param_schedulers)
        self._settings, self.file = ResumeSettings(runner), filename
        try:
            with explaining_other_run(filename):
                yield
        finally:
            self.file = None
        self._settings.apply()

    def check(self, runner: AnyRunner, checkpoint: Checkpoint, filename: str) -> None:
        """Refuse a checkpoint from which training cannot go on, before any hook reads it."""
        if self.file:
            check_types(runner, checkpoint, filename)
            adapt_to_hooks(runner, checkpoint, filename)

    def compare(self, checkpoint: SavedState, filename: str) -> None:
        """Compare the settings of a checkpoint, whose weights are loaded, with the config's."""
        if self.file:
            self._settings.compare(checkpoint, filename)

    def take_states(self, runner: AnyRunner, hook: Hook, checkpoint: SavedState) -> None:
        """Keep the states of this rank, for :meth:`begin`; loaders get theirs now."""
        resumed = (self.file or getattr(runner, '_resume', False)) and self.first is hook
        if resumed and participants.KEY in checkpoint:
            found = checkpoint[participants.KEY]
            states = participants.states_of_this_rank(found, self.file or str(last_read()))
            self.participants.load_state_dict(states)
            self._ranks = len(found['ranks'])

    # training -----------------------------------------------------------------------------------

    @property
    def can_save(self) -> bool:
        """Whether training has begun in this runner."""
        return self._plain is not None

    def begin(self, runner: AnyRunner, complete: bool, finished: bool) -> None:
        """Restore states when all is built that training needs; validate if that was due.

        Args:
            runner (Runner): Before training begins.
            complete (bool): Whether nothing is left to train.
            finished (bool): Whether the run had come to its end.
        """
        if complete:
            begun = f'epoch {runner.epoch} and iteration {runner.iter}: nothing is left to train.'
            limits = f'max_epochs={runner.max_epochs} or max_iters={runner.max_iters}'
            said = 'This run was already finished, at' if finished else 'The checkpoint is of'
            log = runner.logger.info if finished else runner.logger.warning
            log(f'{said} {begun} Raise {limits} of train_cfg to train longer.')
        plain, buffers = self._plain, self._buffers
        if plain is None or buffers is None:
            plain, buffers = self._plain, self._buffers = PlainState(runner), RankBuffers(runner)
            participants.add_hooks(self.participants, runner)
            parts: Dict[str, Stateful] = dict(random=self._random, buffers=buffers, plain=plain)
            for name, part in parts.items():
                self.participants.add(name, part)
        if not self._ranks:
            return
        self.participants.begin()
        ranks, self._ranks = self._ranks, 0
        self._progress = Progress(runner, ranks, buffers, self._random)
        metrics, self.metrics = self.metrics, None
        self.validated = finished or self.validated
        repeat_validation(runner, self.first, metrics)
        if not self.validated:
            self._saved_here = True
            self._progress.validate_if_due()
        self._progress.before_epoch(plain, self.participants)

    def before_epoch(self) -> None:
        """Undo what hooks have done a second time in an epoch that was interrupted."""
        if self._progress is not None:
            self._progress.after_repeating()

    def before_iteration(self, runner: AnyRunner, batch: object) -> None:
        """Let DDP arrange its buckets as they were, before the first iteration."""
        if self._progress is None:
            return
        self._progress.check_batches()
        self._progress = None
        self.participants.check_replaced()
        participants.warn_of_unused(self.participants.waiting)
        if hasattr(runner.model, 'warm_up') and self._plain is not None:
            self._random.state_dict(renew=False)
            restore = self._plain.keep()
            runner.model.warm_up(batch, runner.optim_wrapper)
            restore()
            self._random.restore()

    def after_iteration(self, hook: Hook) -> None:
        """Note that a validation may follow, and that nothing is saved yet."""
        if self.first is hook:
            self.validated = self._saved_here = False

    def after_epoch(self, runner: AnyRunner, hook: Hook) -> None:
        """Note that a validation may follow, in a loop over epochs."""
        if self.first is hook and not hasattr(runner.train_loop, 'dataloader_iterator'):
            self.validated = False

    def after_validation(self, metrics: Mapping[str, object]) -> None:
        """Note a validation, and the metrics that are numbers."""
        self.metrics = {k: value for k, value in metrics.items() if isinstance(value, NUMBERS)}
        if self.validated is False:
            self.validated = True
            if self._saved_here:
                self._random.restore(only_lazy=True)

    def nothing_is_due(self, runner: AnyRunner) -> bool:
        """Whether no validation is left to do."""
        return bool(self.validated) or not validation_follows(runner)

    # saving -------------------------------------------------------------------------------------

    def state_dict(self) -> StateDict:
        """Whether the validation that follows was done, and its metrics."""
        return dict(validated=self.validated, metrics=self.metrics)

    def load_state_dict(self, state: SavedState) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.validated, self.metrics = state['validated'], state['metrics']

    @contextmanager
    def gathered(self, wanted: bool) -> Iterator[None]:
        """Gather the states of all ranks, if they are wanted and anything was trained.

        Inside, :meth:`add_states` adds them to a checkpoint.
        """
        if wanted and self.validated is not None:
            self._saved_here = True
            self._states = participants.gather_states(self.participants)
        try:
            yield
        finally:
            self._states = None

    def add_states(self, checkpoint: Checkpoint) -> None:
        """Add the gathered states to a checkpoint that holds optimizers."""
        if self._states is not None and 'optimizer' in checkpoint:
            checkpoint[participants.KEY] = self._states
