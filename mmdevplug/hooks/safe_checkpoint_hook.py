"""Save checkpoints that survive a kill or a full disk and resume exactly."""

from functools import partial
from inspect import Parameter, signature
from typing import Any, Dict, Optional, Sequence, Set

import numpy as np
import torch
from mmengine.fileio import join_path
from mmengine.hooks import CheckpointHook
from mmengine.registry import HOOKS

from mmdevplug.checkpoint.participants import KEY
from mmdevplug.checkpoint.resume import Resume
from mmdevplug.checkpoint.saving import CheckpointSaver
from mmdevplug.config.checkpoint import CheckpointOptions
from mmdevplug.config.fields import refuse_unknown
from mmdevplug.distributed.waiting import run_on_main
from mmdevplug.errors import CheckpointError
from mmdevplug.patches.torch_load import safe_loading
from mmdevplug.utils.annotations import AnyRunner
from mmdevplug.utils.loops import progress_of, validation_follows
from mmdevplug.utils.state_types import Maybe

_NUMBERS = (bool, int, float, np.number, torch.Tensor)


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

    rules: Any
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
        #: What all checkpoint hooks of a runner share.
        self._resume_state = Resume()
        #: The states of all ranks, while a checkpoint is saved.
        self._exact: Optional[Dict] = None
        self._warned: Set[str] = set()

    state_types = dict(validated=False, metrics=Maybe({}))

    def state_dict(self) -> Dict[str, Any]:
        """What is known of the validation that follows."""
        return dict(validated=self._resume_state.validated, metrics=self._resume_state.metrics)

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        shared = self._resume_state
        shared.validated, shared.metrics = state['validated'], state['metrics']

    def before_run(self, runner: AnyRunner) -> None:
        """Find loaders; refuse options that neither this hook nor ``save_checkpoint`` takes."""
        self._resume_state = Resume.of(runner, self)
        self._resume_state.participants.add_loops(runner)
        if self.args:
            taken = signature(runner.save_checkpoint).parameters
            known = [*CheckpointOptions.names(), *signature(CheckpointHook).parameters, *taken]
            if not any(one.kind is Parameter.VAR_KEYWORD for one in taken.values()):
                refuse_unknown(self.args, known, CheckpointOptions.key, CheckpointError)

    def after_load_checkpoint(self, runner: AnyRunner, checkpoint: dict) -> None:
        """Keep the states for exact resuming."""
        self._resume_state = Resume.of(runner, self)
        resumed = self._resume_state.file or getattr(runner, '_resume', False)
        if resumed and self._resume_state.first is self:
            self._resume_state.take_states(checkpoint)

    def before_train(self, runner: AnyRunner) -> None:
        """Prepare the folder, if it can be written to, and restore an interrupted run."""
        super().before_train(runner)
        done, last = progress_of(runner.train_loop) or (0, 1)
        complete = runner.iter > 0 and done >= last
        prepare = partial(self._saver.prepare, runner, self.out_dir, complete)
        finished = run_on_main('preparing the folder of checkpoints', prepare) and complete
        if self._resume_state.first is not self:
            return
        if complete:
            begun = f'epoch {runner.epoch} and iteration {runner.iter}: nothing is left to train.'
            limits = f'max_epochs={runner.max_epochs} or max_iters={runner.max_iters}'
            said = 'This run was already finished, at' if finished else 'The checkpoint is of'
            log = runner.logger.info if finished else runner.logger.warning
            log(f'{said} {begun} Raise {limits} of train_cfg to train longer.')
        self._resume_state.begin(runner, finished)

    def before_train_epoch(self, runner: AnyRunner) -> None:
        """Undo what hooks have done a second time in an epoch that was interrupted."""
        self._resume_state.before_epoch()

    def before_train_iter(self, runner: AnyRunner, batch_idx: int, data_batch: Any = None) -> None:
        """Let DDP arrange its buckets as they were."""
        self._resume_state.before_iteration(runner, data_batch)

    def after_train_iter(self, runner: AnyRunner, *args: Any, **kwargs: Any) -> None:
        """Save at the interval; see :class:`mmengine.hooks.CheckpointHook`."""
        if self._resume_state.first is self:
            self._resume_state.after_iteration()
        super().after_train_iter(runner, *args, **kwargs)

    def after_train_epoch(self, runner: AnyRunner) -> None:
        """Save at the interval; see :class:`mmengine.hooks.CheckpointHook`."""
        if self._resume_state.first is self and not hasattr(
            runner.train_loop, 'dataloader_iterator'
        ):
            self._resume_state.after_epoch()
        super().after_train_epoch(runner)

    def after_val_epoch(self, runner: AnyRunner, metrics: Optional[Dict] = None) -> None:
        """Save the best checkpoint; see :class:`mmengine.hooks.CheckpointHook`."""
        self._resume_state.after_validation()
        self._resume_state.metrics = {
            name: value for name, value in (metrics or {}).items() if isinstance(value, _NUMBERS)
        }
        super().after_val_epoch(runner, metrics)
        self._resume_state.metrics = None

    def save_now(self, runner: AnyRunner) -> str:
        """Save at the end of any iteration, and return the path; failing is always an error.

        The file is removed after the next checkpoint of the ordinary kind.
        """
        step = runner.iter + 1
        meta = dict(epoch=runner.epoch, iter=step)
        path = self._path(f'interrupted_iter_{step}.pth')
        runner.message_hub.update_info('interrupted_ckpt', path)
        self._save(runner, path, [], meta)
        self._saver.finish()
        return path

    def before_save_checkpoint(self, runner: AnyRunner, checkpoint: dict) -> None:
        """Add the states for exact resuming, on rank 0."""
        if self._exact is not None and 'optimizer' in checkpoint:
            checkpoint[KEY] = self._exact

    def _path(self, name: str) -> str:
        return str(join_path(self.out_dir, name, backend_args=self.backend_args))

    def _save_checkpoint_with_step(self, runner: AnyRunner, step: int, meta: dict) -> None:
        path = self._path(self.filename_tmpl.format(step))
        hub = runner.message_hub
        outdated = []
        before = list(self.keep_ckpt_ids) if self.max_keep_ckpts > 0 else [step]
        if before[-1:] != [step]:
            kept = [*before, step][-self.max_keep_ckpts :]
            outdated = [
                self._path(self.filename_tmpl.format(old)) for old in before if old not in kept
            ]
            self.keep_ckpt_ids.append(step)
            hub.update_info('keep_ckpt_ids', kept)
        if 'interrupted_ckpt' in hub.runtime_info:
            outdated.append(hub.pop_info('interrupted_ckpt'))
        self.last_ckpt = path
        hub.update_info('last_ckpt', path)
        self._save(runner, path, outdated, meta)

    def _save_best_checkpoint(self, runner: AnyRunner, metrics: dict) -> None:
        if not (
            self.save_best and self._resume_state.can_save
        ):  # or it validates without training
            return
        step = runner.epoch if self.by_epoch else runner.iter
        meta = dict(epoch=runner.epoch, iter=runner.iter)
        hub, rules, saved_any = runner.message_hub, self.rules, False
        if 'auto' in self.key_indicators:
            try:
                self._init_rule(rules, [next(iter(metrics))])
            except ValueError as error:
                self.rules = rules
                self._warn_of_best(runner, f'{error} Set default_hooks.checkpoint.rule')
                return
        single, whole = len(self.key_indicators) == 1, self._saver.options.resumable_best
        for key, rule in zip(self.key_indicators, self.rules):
            score, suffix = metrics.get(key), '' if single else f'_{key}'
            if score != score or not isinstance(score, _NUMBERS):
                said = f'{key!r} is {score!r}, with which nothing compares, of {sorted(metrics)}'
                self._warn_of_best(runner, said)
                continue
            best = hub.get_info(f'best_score{suffix}', self.init_value_map[rule])
            if not self.is_better_than[key](score, best):
                continue
            saved_any = True
            name = f'best_{key}_{self.filename_tmpl.format(step)}'.replace('/', '_')
            path = self._path(name)
            outdated = [hub.get_info(f'best_ckpt{suffix}', path)]
            hub.update_info(f'best_score{suffix}', score)
            hub.update_info(f'best_ckpt{suffix}', path)
            options = dict(save_optimizer=whole, save_param_scheduler=whole, by_epoch=False)
            self._save(runner, path, outdated, meta, names_it=False, **options)
            if single:
                self.best_ckpt_path = path
            else:
                self.best_ckpt_path_dict[key] = path
            runner.logger.info(
                f'The best checkpoint with {score:0.4f} {key} at {step} '
                f'{"epoch" if self.by_epoch else "iter"} is saved to {name}.'
            )
        # Once more, so that the newest checkpoint knows of the best score and its file.
        if saved_any and self.last_ckpt is not None:
            self._save_checkpoint_with_step(runner, step, meta)

    def _warn_of_best(self, runner: AnyRunner, why: str) -> None:
        if why not in self._warned:
            self._warned.add(why)
            runner.logger.warning(
                f'default_hooks.checkpoint.save_best={self.save_best}: {why}. Training goes on '
                f'without a best checkpoint of it; correct the config and resume.'
            )

    def after_train(self, runner: AnyRunner) -> None:
        """Wait for the background, and publish."""
        self._saver.finish()
        super().after_train(runner)
        done, last = progress_of(runner.train_loop) or (0, 1)
        if done >= last and (self._resume_state.validated or not validation_follows(runner)):
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
        if options['save_optimizer']:
            self._exact = self._resume_state.gather()
        try:
            self._saver.save(runner, path, outdated, meta=dict(meta), **options)
        finally:
            self._exact = None  # each checkpoint hook is asked when another one saves

    def _publish_model(self, runner: AnyRunner, ckpt_path: Optional[str]) -> None:
        if ckpt_path:
            with safe_loading(ckpt_path):
                super()._publish_model(runner, ckpt_path)
