"""Keep the samples of an iteration over all ranks, or the learning rate, whatever their number.

A job that hosts join and leave, or that resumes on fewer devices, has another number of ranks. By
``accelerator.global_batch_rule`` either each rank takes more samples, in steps of the config's
batch size (``'accumulate'``), or the learning rate follows the batch (``'scale'``).
"""

import copy
from functools import partial
from typing import Any, Callable, List, Mapping, NamedTuple, Optional

from mmengine.registry import FUNCTIONS
from mmengine.runner import BaseLoop

from mmdevplug.config.accelerator import AcceleratorOptions
from mmdevplug.environments.launch_variables import LaunchEnv, most_ranks
from mmdevplug.errors import LaunchError
from mmdevplug.optim.replay_schedulers import scale_lr
from mmdevplug.optim.split_step import SplitCollate, SplitStep
from mmdevplug.utils.annotations import AnyOptimWrapper, AnyRunner
from mmdevplug.utils.patching import replace_attribute


class GlobalBatch(NamedTuple):
    """How the samples of an iteration are shared out.

    Examples:
        >>> share = GlobalBatch(wanted=32, step=4, rank=16, ranks=2)
        >>> share.steps, share.lr_factor
        (4, 1.0)
    """

    wanted: int  # samples of an iteration over all ranks, for which the learning rate is
    step: int  # samples of a forward pass
    rank: int  # samples of an iteration on each rank, a multiple of it
    ranks: int

    @property
    def total(self) -> int:
        """Samples of an iteration over all ranks."""
        return self.rank * self.ranks

    @property
    def steps(self) -> int:
        """Forward and backward passes of an iteration."""
        return self.rank // self.step

    @property
    def lr_factor(self) -> float:
        """By what the learning rate of the config is multiplied."""
        return self.total / self.wanted

    def describe(self) -> str:
        """Say in one line what an iteration is."""
        line = (
            f'Global batch: {self.total} samples, {self.rank} on each of {self.ranks} rank(s) in '
            f'{self.steps} step(s) of {self.step}'
        )
        if self.total == self.wanted:
            return f'{line}.'
        return (
            f'{line}; {self.wanted} are asked for, so learning rates are x {self.lr_factor:.6g}.'
        )


def share_out(
    options: AcceleratorOptions, step: int, ranks: int, most: Optional[int]
) -> Optional[GlobalBatch]:
    """Share out the samples of an iteration; None if the config and the job leave it to MMEngine.

    Args:
        options (AcceleratorOptions): With ``global_batch`` and ``global_batch_rule``.
        step (int): The batch size of the config.
        ranks (int): The ranks of the job, now.
        most (int, optional): Its ranks when all hosts have joined; None if none can join.
    """
    wanted = options.global_batch
    if wanted is None:
        if most is None:
            return None
        wanted = step * most
    if options.global_batch_rule == 'scale':
        return GlobalBatch(wanted, step, step, ranks)
    if wanted <= ranks * step:
        rank = max(1, _nearest(wanted, ranks))
        return GlobalBatch(wanted, rank, rank, ranks)
    # Steps of equal size: their average is that of the samples, and a lazy device has one graph.
    rank, rest = divmod(wanted, ranks)
    size = max(size for size in range(1, step + 1) if rank % size == 0)
    if rest == 0 and (size > 1 or step == 1):
        return GlobalBatch(wanted, size, rank, ranks)
    # One sample would be too few for batch norm: the nearest number of whole steps.
    return GlobalBatch(wanted, step, step * _nearest(wanted, ranks * step), ranks)


def _nearest(number: int, divisor: int) -> int:
    return (2 * number + divisor) // (2 * divisor)


def share_of_job(
    options: AcceleratorOptions, loader: Any, env: LaunchEnv
) -> Optional[GlobalBatch]:
    """Share out the samples of this job's iterations; see :func:`share_out`."""
    is_config = isinstance(loader, Mapping)
    size = loader.get('batch_size', 1) if is_config else getattr(loader, 'batch_size', None)
    most = most_ranks(env.launcher)
    if isinstance(size, int):
        share = share_out(options, size, env.world_size, most)
        if share is None or is_config or share.rank == size:
            return share
    elif options.global_batch is None and most is None:
        return None
    raise LaunchError(
        f'accelerator.global_batch={options.global_batch} and a train_dataloader that was built '
        f'with batch_size={size} disagree: its batches cannot change with the number of ranks. '
        f'Expected a config: train_dataloader=dict(batch_size=..., ...).'
    )


def refuse_for_flexible_runner(options: AcceleratorOptions, launcher: str) -> None:
    """Refuse what would train with another batch than was asked for."""
    most = most_ranks(launcher)
    if options.global_batch is None and most is None:
        return
    found = f'accelerator.global_batch={options.global_batch}'
    if options.global_batch is None:
        found = f'--nnodes MIN:MAX, with up to {most} ranks,'
    raise LaunchError(
        f'{found} and FlexibleRunner disagree: it cannot keep the global batch while the number '
        f"of ranks changes. Expected runner_type='DeviceRunner'."
    )


class GlobalBatchKeeper:
    """Apply a :class:`GlobalBatch` to a runner.

    Args:
        runner (DeviceRunner): The runner.
    """

    def __init__(self, runner: AnyRunner) -> None:
        self.runner = runner
        #: How samples are shared out; None where that is left to MMEngine.
        self.share: Optional[GlobalBatch] = None
        #: The config of the schedulers, which the runner replaces by what it builds.
        self.schedulers: Any = None
        self._scaled = False

    @property
    def splits(self) -> bool:
        """Whether a batch has several parts, each for a forward and a backward pass."""
        return self.share is not None and self.share.steps > 1

    def adapt_loader(self, loader: Any) -> Any:
        """Return the config of the data loader for this rank's share."""
        runner = self.runner
        self.share = share_of_job(runner.accelerator_options, loader, runner.device_context.env)
        if self.share is None:
            return loader
        runner.logger.info(self.share.describe())
        return _adapt_dataloader(loader, self.share)

    def check_loop(self, loop: BaseLoop) -> None:
        """Refuse a loop that takes samples out of batches, where a batch has several parts."""
        if self.splits and hasattr(loop, 'batches_drawn'):
            raise LaunchError(
                f'accelerator.global_batch={self.share.wanted} and {type(loop).__name__} '
                f'disagree: it chooses samples from whole batches, and these have '
                f'{self.share.steps} parts. Expected '
                f"accelerator.global_batch_rule='scale', or no global_batch."
            )

    def split_step(self) -> None:
        """Let the model train on batches of several parts."""
        model = self.runner.model
        if self.splits and not isinstance(model.train_step, SplitStep):
            step = SplitStep(model.train_step, self.share.steps)
            replace_attribute(model, 'train_step', step)

    def scale_lr(self, optim_wrapper: AnyOptimWrapper, auto_scale_lr: Mapping) -> None:
        """Multiply learning rates, unless MMEngine has done so for the batch of this job."""
        self._compare_batch(auto_scale_lr)
        if self._scaled:
            return  # A second `train()` goes on with the optimizer of the first.
        self._scaled = True
        if self.share is not None and not auto_scale_lr.get('enable'):
            scale_lr(optim_wrapper, self.share.lr_factor)

    def _compare_batch(self, auto_scale_lr: Mapping) -> None:
        """Warn if the learning rate is meant for another batch size and is not scaled."""
        runner, base = self.runner, auto_scale_lr.get('base_batch_size')
        if base is None or auto_scale_lr.get('enable'):
            return
        if runner.accelerator_options.global_batch is not None:
            return
        size = runner.train_dataloader.batch_size
        batch = None if size is None else size * runner.world_size
        if batch not in (None, base):
            runner.logger.warning(
                f'auto_scale_lr.base_batch_size={base}, but {batch} samples make a batch ({size} '
                f'on each of {runner.world_size} rank(s)), and the learning rate is not scaled: '
                f'mmdevplug train CONFIG --auto-scale-lr, or auto_scale_lr.enable=True.'
            )

    def note_schedulers(self, config: object) -> None:
        """Keep the config of the schedulers."""
        if self.schedulers is None:
            self.schedulers = copy.deepcopy(config)

    def follow(self, before: int) -> None:
        """Set learning rates after resuming from iterations of ``before`` samples."""
        runner = self.runner
        runner.resumption.apply(runner.iter)
        runner.logger.info(
            f'Iterations had {before} samples before. In epoch {runner.epoch + 1}, at iteration '
            f'{runner.iter}, learning rates and schedulers are set for those of now. '
            f'{self.share.describe()}'
        )
        runner.optim_wrapper.initialize_count_status(
            runner.model, runner.iter, runner.train_loop.max_iters
        )


def _adapt_dataloader(loader: Any, share: GlobalBatch) -> Any:
    """Return the config of a data loader for the share of a rank."""
    if not isinstance(loader, Mapping):
        return loader
    loader = copy.copy(loader)
    loader['batch_size'] = share.rank
    if share.steps > 1:
        loader['collate_fn'] = SplitCollate(_find_collate(loader.get('collate_fn')), share.steps)
    return loader


def _find_collate(config: Any) -> Callable[[List], Any]:
    """Find the function as MMEngine's runner does."""
    config = dict(type='pseudo_collate') if config is None else config
    if not isinstance(config, Mapping):
        return config
    options = dict(config)
    kind = options.pop('type')
    return partial(FUNCTIONS.get(kind) if isinstance(kind, str) else kind, **options)
