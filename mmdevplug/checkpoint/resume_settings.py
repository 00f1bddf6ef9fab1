"""Decide whether a resumed run has the settings of its checkpoint or those of its config.

MMEngine loads the states of optimizers and schedulers over what the config says, without a word.
Here both are compared before, and afterwards the chosen settings are set, with the schedules at
the step that training has reached.
"""

from typing import Any, Dict, List, Mapping, Optional

from mmengine.optim import OptimWrapperDict
from mmengine.runner import EpochBasedTrainLoop

from mmdevplug.optim.replay_schedulers import Past
from mmdevplug.utils.annotations import AnyOptimWrapper, AnyRunner
from mmdevplug.utils.logs import log_warning
from mmdevplug.utils.loops import length_of, loader_of

from .compare_settings import Difference, describe_differences
from .optimizer_settings import Length, OptimizerSettings, optimizer_kind
from .refuse_resume import check_complete, optimizer_states


class ResumeSettings:
    """Compare settings before MMEngine loads states, and set them afterwards.

    Args:
        optimizers (list[OptimizerSettings]): As they were built from the config.
        length (Length): Of this run.
        by_epoch (bool): Whether its loop counts epochs.
        choice (str): ``'checkpoint'`` or ``'config'``: ``accelerator.resume_settings``.
        scaled_by (str, optional): The key of the config that has set learning rates for the batch
            of this job; they hold in any case.
    """

    def __init__(
        self,
        optimizers: List[OptimizerSettings],
        length: Length,
        by_epoch: bool,
        choice: str,
        scaled_by: Optional[str] = None,
    ) -> None:
        self.optimizers, self.length, self.by_epoch = optimizers, length, by_epoch
        self.choice, self.scaled_by = choice, scaled_by
        self._then, self._past = length, Past(0, 0, 1)

    @classmethod
    def of_runner(cls, runner: AnyRunner) -> 'ResumeSettings':
        """Read the settings of a :class:`mmdevplug.runner.DeviceRunner`, as it has built them."""
        loop, config = runner.train_loop, runner.scheduler_config
        scaled = (runner.auto_scale_lr or {}).get('enable')
        by_epoch = isinstance(loop, EpochBasedTrainLoop)
        return cls(
            list_optimizers(runner.optim_wrapper, runner.param_schedulers, config),
            Length(loop.max_epochs, loop.max_iters, length_of(loader_of(loop)) or 1),
            by_epoch,
            runner.accelerator_options.resume_settings,
            'auto_scale_lr' if scaled else None,
        )

    def compare(self, checkpoint: Mapping[str, Any], where: str, work_dir: str) -> None:
        """Compare with a checkpoint, and say in one warning what differs and which is taken.

        Raises:
            CheckpointError: If training cannot go on from the checkpoint with this config.
        """
        scheduled = any(one.schedulers for one in self.optimizers)
        check_complete(checkpoint, where, scheduled and self.choice == 'checkpoint', work_dir)
        info = checkpoint['message_hub'].get('runtime_info') or {}
        epochs, iters, epoch = info.get('max_epochs'), info.get('max_iters'), self.length.epoch
        if self.by_epoch and epochs and iters:
            epoch = max(1, iters // epochs)
        self._then, meta = Length(epochs, iters, epoch), checkpoint['meta']
        self._past = Past(meta['epoch'] if self.by_epoch else 0, meta['iter'], epoch)
        found: List[Difference] = []
        before, now = self._then.of(self.by_epoch), self.length.of(self.by_epoch)
        if None not in (before, now) and before != now:
            found.append(Difference(f'train_cfg.{self._limit}', before, now, 'config'))
        states = optimizer_states(checkpoint, [one.name for one in self.optimizers], where)
        for one, state in zip(self.optimizers, states):
            found += one.compare(checkpoint, state, where, self.choice, self.scaled_by, self._then)
        if found:
            log_warning(
                f'Resuming from {where}, which differs from the config in {len(found)} '
                f'setting(s). {describe_differences(found)}. {self._explain(found)}'
            )

    @property
    def _limit(self) -> str:
        return 'max_epochs' if self.by_epoch else 'max_iters'

    def _explain(self, found: List[Difference]) -> str:
        if self.choice == 'config':
            return "They are taken as accelerator.resume_settings='config' says."
        if all(one.taken == 'config' for one in found):
            return 'They follow the config in any case.'
        return (
            "To take the config's, resume with --resume-settings config "
            "(accelerator.resume_settings='config')."
        )

    def apply(self) -> None:
        """Set the settings that are taken, after MMEngine has loaded the checkpoint's states."""
        before, now = self._then.of(self.by_epoch), self.length.of(self.by_epoch)
        for one in self.optimizers:
            one.apply(self._past, self.length.epoch)
            early = one.describe_early_end(self._then, self.length)
            if early and None not in (before, now) and before < now:
                log_warning(
                    f'Training goes on to {self._limit}={now}, but {early}. Raise that in the '
                    f'config and resume with --resume-settings config.'
                )


def list_optimizers(
    optim_wrapper: AnyOptimWrapper, schedulers: Any, config: Any
) -> List[OptimizerSettings]:
    """List the optimizers of a runner with their schedulers and the configs of these."""
    if not isinstance(optim_wrapper, OptimWrapperDict):
        return [OptimizerSettings('', optim_wrapper, schedulers, config)]
    by_name = isinstance(config, Mapping) and 'type' not in config
    return [
        OptimizerSettings(
            name, one, (schedulers or {}).get(name), config.get(name) if by_name else config
        )
        for name, one in optim_wrapper.items()
    ]


def describe_kinds(optim_wrapper: AnyOptimWrapper, schedulers: Any) -> Dict[str, Any]:
    """Name the classes of optimizers and schedulers, for a checkpoint that holds their states."""
    wrappers, lists = {'': optim_wrapper}, {'': schedulers}
    if isinstance(optim_wrapper, OptimWrapperDict):
        wrappers, lists = dict(optim_wrapper.items()), schedulers or {}
    return {
        name: dict(
            optimizer=optimizer_kind(one.optimizer),
            schedulers=[type(each).__name__ for each in lists.get(name) or ()],
        )
        for name, one in wrappers.items()
    }
