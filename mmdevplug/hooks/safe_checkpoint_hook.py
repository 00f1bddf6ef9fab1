"""Save checkpoints that survive a kill or a full disk and resume exactly."""

from functools import partial
from typing import Any, Dict, List, Optional, Sequence

from mmengine.fileio import join_path
from mmengine.hooks import CheckpointHook
from mmengine.registry import HOOKS

from mmdevplug.checkpoint.best import BestCheckpoints
from mmdevplug.checkpoint.resume import Resume
from mmdevplug.checkpoint.saving import CheckpointSaver, check_arguments
from mmdevplug.config.checkpoint import CheckpointOptions
from mmdevplug.patches.torch_load import safe_loading
from mmdevplug.utils.annotations import AnyRunner, StateDict
from mmdevplug.utils.loops import is_complete
from mmdevplug.utils.state_types import Maybe


@HOOKS.register_module()
class SafeCheckpointHook(CheckpointHook):
    """Save MMEngine's checkpoints so that none is ever lost, and resume exactly.

    A checkpoint is written to a temporary file, flushed to the disk and renamed; then
    ``last_checkpoint`` names it, and only then outdated ones are removed. If a write fails, the
    earlier checkpoints are still there. Besides what MMEngine saves, the file holds the random
    states of all ranks and the position in the data, under the key ``mmdevplug``, which MMEngine
    ignores: training resumes as if it had not been interrupted, also in the middle of an epoch.

    Args:
        *args: See :class:`mmengine.hooks.CheckpointHook`.
        **options: Fields of :class:`mmdevplug.config.checkpoint.CheckpointOptions`:
            ``async_save=False`` and ``resumable_best=False``; and arguments of
            :class:`mmengine.hooks.CheckpointHook`. Others are arguments of a ``save_checkpoint``
            of the runner's own.

    Raises:
        CheckpointError: If an option has an impossible value.

    Examples:
        >>> default_hooks = dict(
        ...     checkpoint=dict(type='SafeCheckpointHook', interval=1, async_save=True))
    """

    rules: Optional[List[str]]
    lost = 'a resumed run is not exact, and a signal saves no checkpoint'
    #: What is lost where a subclass has a method of its own that does not call ``super()``.
    promises = dict(
        before_run='the position in the data is not saved',
        after_load_checkpoint='a resumed run is not exact',
        before_train='a resumed run does not go on where it was',
        before_train_epoch='hooks count an interrupted epoch twice',
        before_train_iter='ranks may add up gradients in another order after resuming',
        after_train_iter='checkpoints do not hold what exact resuming needs',
        after_train_epoch='no checkpoint is saved at the end of an epoch',
        after_val_epoch='a validation may be repeated after resuming',
        after_train='checkpoints in the background are not waited for',
        before_save_checkpoint='checkpoints do not hold what exact resuming needs',
        _save_checkpoint_with_step='checkpoints do not hold what exact resuming needs',
        _save_best_checkpoint='the newest checkpoint does not know the best score',
    )

    def __init__(self, *args: object, **options: object) -> None:
        ours = CheckpointOptions.read(options)
        super().__init__(*args, **{name: options[name] for name in options if name not in ours})
        self._saver = CheckpointSaver(CheckpointOptions(**ours), self.backend_args)
        #: Shared by all checkpoint hooks of a runner.
        self._resume_state = Resume()
        self._best = BestCheckpoints(self, self._saver.options.resumable_best)

    state_types = dict(validated=False, metrics=Maybe({}))

    def state_dict(self) -> StateDict:
        """Whether the validation that follows was done, and its metrics."""
        return self._resume_state.state_dict()

    def load_state_dict(self, state: StateDict) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._resume_state.load_state_dict(state)

    def before_run(self, runner: AnyRunner) -> None:
        """Find loaders; refuse options that neither this hook nor ``save_checkpoint`` takes."""
        self._resume_state = Resume.of(runner, self)
        self._resume_state.participants.add_loops(runner)
        check_arguments(runner, self.args)

    def after_load_checkpoint(self, runner: AnyRunner, checkpoint: dict) -> None:
        """Keep the states for exact resuming."""
        self._resume_state = Resume.of(runner, self)
        self._resume_state.take_states(runner, self, checkpoint)

    def before_train(self, runner: AnyRunner) -> None:
        """Prepare the folder, if it can be written to, and restore an interrupted run."""
        super().before_train(runner)
        complete = runner.iter > 0 and is_complete(runner)
        finished = self._saver.prepare(runner, self.out_dir, complete) and complete
        if self._resume_state.first is self:
            self._resume_state.begin(runner, complete, finished)

    def before_train_epoch(self, runner: AnyRunner) -> None:
        """Undo what hooks have done a second time in an epoch that was interrupted."""
        self._resume_state.before_epoch()

    def before_train_iter(
        self, runner: AnyRunner, batch_idx: int, data_batch: object = None
    ) -> None:
        """Let DDP arrange its buckets as they were."""
        self._resume_state.before_iteration(runner, data_batch)

    def after_train_iter(self, runner: AnyRunner, *args: object, **kwargs: object) -> None:
        """Save at the interval; see :class:`mmengine.hooks.CheckpointHook`."""
        self._resume_state.after_iteration(self)
        super().after_train_iter(runner, *args, **kwargs)

    def after_train_epoch(self, runner: AnyRunner) -> None:
        """Save at the interval; see :class:`mmengine.hooks.CheckpointHook`."""
        self._resume_state.after_epoch(runner, self)
        super().after_train_epoch(runner)

    def after_val_epoch(self, runner: AnyRunner, metrics: Optional[Dict] = None) -> None:
        """Save the best checkpoint; see :class:`mmengine.hooks.CheckpointHook`."""
        self._resume_state.after_validation(metrics or {})
        super().after_val_epoch(runner, metrics)
        self._resume_state.metrics = None

    def save_now(self, runner: AnyRunner) -> str:
        """Save at the end of any iteration, and return the path; failing is always an error.

        The file is removed after the next checkpoint of the ordinary kind.
        """
        step = runner.iter + 1
        meta = dict(epoch=runner.epoch, iter=step)
        path = self.path_of(f'interrupted_iter_{step}.pth')
        runner.message_hub.update_info('interrupted_ckpt', path)
        self._save(runner, path, [], meta)
        self._saver.finish()
        return path

    def before_save_checkpoint(self, runner: AnyRunner, checkpoint: dict) -> None:
        """Add the states for exact resuming, on rank 0."""
        self._resume_state.add_states(checkpoint)

    def path_of(self, name: str) -> str:
        """The path of a file in the folder of checkpoints."""
        return str(join_path(self.out_dir, name, backend_args=self.backend_args))

    def _save_checkpoint_with_step(self, runner: AnyRunner, step: int, meta: dict) -> None:
        path = self.path_of(self.filename_tmpl.format(step))
        hub = runner.message_hub
        outdated = []
        before = list(self.keep_ckpt_ids) if self.max_keep_ckpts > 0 else [step]
        if before[-1:] != [step]:
            kept = [*before, step][-self.max_keep_ckpts :]
            outdated = [
                self.path_of(self.filename_tmpl.format(old)) for old in before if old not in kept
            ]
            self.keep_ckpt_ids.append(step)
            hub.update_info('keep_ckpt_ids', kept)
        if 'interrupted_ckpt' in hub.runtime_info:
            outdated.append(hub.pop_info('interrupted_ckpt'))
        self.last_ckpt = path
        hub.update_info('last_ckpt', path)
        self._save(runner, path, outdated, meta)

    def _save_best_checkpoint(self, runner: AnyRunner, metrics: dict) -> None:
        if not (self.save_best and self._resume_state.can_save):
            return  # no training has begun: this is a validation alone
        step = runner.epoch if self.by_epoch else runner.iter
        meta = dict(epoch=runner.epoch, iter=runner.iter)
        saved = self._best.save(runner, metrics, step, partial(self._save, runner, meta=meta))
        # Once more, so that the newest checkpoint knows of the best score and its file.
        if saved and self.last_ckpt is not None:
            self._save_checkpoint_with_step(runner, step, meta)

    def after_train(self, runner: AnyRunner) -> None:
        """Wait for the background, and publish."""
        self._saver.finish()
        super().after_train(runner)
        if is_complete(runner) and self._resume_state.nothing_is_due(runner):
            self._saver.note_finished(runner)

    def _save(
        self, runner: AnyRunner, path: str, outdated: Sequence[str], meta: dict, **options: Any
    ) -> None:
        options = options or dict(
            save_optimizer=self.save_optimizer,
            save_param_scheduler=self.save_param_scheduler,
            by_epoch=self.by_epoch,
            **self.args,
        )
        with self._resume_state.gathered(options['save_optimizer']):
            self._saver.save(runner, path, outdated, meta=dict(meta), **options)

    def _publish_model(self, runner: AnyRunner, ckpt_path: Optional[str]) -> None:
        if ckpt_path:
            with safe_loading(ckpt_path):
                super()._publish_model(runner, ckpt_path)
