"""Save and restore what MMEngine leaves out of a checkpoint, so that resuming is exact.

These are the random states of every rank, the batches of the epoch that were trained on, the seed
that the sampler really used, and whether the validation that follows was done already.
"""

import copy
from typing import Any, Dict, List, Optional, Tuple

from mmengine.dist import get_rank, get_world_size
from mmengine.runner import BaseLoop
from mmengine.runner.loops import (
    EpochBasedTrainLoop,
    IterBasedTrainLoop,
    _InfiniteDataloaderIterator,
)
from torch import nn
from torch.utils.data import BatchSampler, DataLoader

from mmdevplug.accelerators import rank_device, rank_devices
from mmdevplug.accelerators.random_states import (
    random_state,
    set_host_random_state,
    set_random_state,
)
from mmdevplug.data import make_resumable
from mmdevplug.data.resumable_loader import (
    ResumableBatches,
    renew_sampler,
    resumable_batches,
    sampler_of,
    seed_workers,
)
from mmdevplug.data.stateful import at_next_start, start_silently, stateful_part
from mmdevplug.distributed.byte_exchange import gather_json
from mmdevplug.samples import gather_samples
from mmdevplug.utils.annotations import AnyRunner
from mmdevplug.utils.logs import log_warning
from mmdevplug.utils.loops import loader_of
from mmdevplug.utils.model import unwrap_model

from .other_loaders import OtherLoaders, batch_size_of
from .plain_state import PlainState
from .states import (
    gather_buffers,
    gather_packed,
    had_switched_pipeline,
    hook_states,
    loader_states,
    loaders_by_name,
    restart_workers_silently,
    restore_buffers,
    restore_hook_states,
    restore_loaders,
    unpack,
)
from .training_position import (
    Position,
    ReadStart,
    ResumedIterator,
    number_batches_from,
)

#: The key in a checkpoint.
KEY = 'mmdevplug'
VERSION = 1


def capture(
    runner: AnyRunner, position: Position, plain: PlainState, others: OtherLoaders
) -> Dict:
    """Collect plain values and host tensors for the key :data:`KEY`; all ranks take part."""
    accelerator, _ = rank_device()
    loader = loader_of(runner.train_loop)
    batches = resumable_batches(loader)
    accelerator.renew_rng()
    mine = dict(
        random=random_state(accelerator, rank_devices()),
        at_start=None if batches is None else batches.state_at_start,
    )
    ranks = gather_json(mine) if get_world_size() > 1 else [mine]
    data = None
    source = stateful_part(loader)
    if source is not None:
        # A copy, because it may be written while training goes on.
        state = copy.deepcopy(source.state_dict())
        data = gather_samples([state], device='cpu', same_structure=False)
    known = list(loaders_by_name(runner).values())
    of_ranks = gather_packed(dict(plain=plain.changed(), loaders=others.states(known)))
    return dict(
        buffers=gather_buffers(unwrap_model(runner.model), accelerator),
        averaged_buffers=[gather_buffers(each, accelerator) for each in _averaged_models(runner)],
        version=VERSION,
        epoch=position.epoch,
        batch=position.batch,
        validated=position.validated,
        world_size=get_world_size(),
        batch_size=batch_size_of(loader),
        sampler_seed=getattr(sampler_of(loader), 'seed', None),
        ranks=ranks,
        data=data,
        loaders=loader_states(runner),
        of_ranks=of_ranks,
        hooks=hook_states(runner),
    )


def of_this_rank(saved: Dict) -> Dict[str, Dict]:
    """The states of modules, hooks and loaders that belong to this rank; rank 0's to a new one."""
    if 'of_ranks' not in saved:
        return dict(plain={}, loaders={})
    return unpack(saved['of_ranks'][get_rank() if saved['world_size'] == get_world_size() else 0])


class Resumption:
    """Restore what :func:`capture` collected in a runner that has resumed as MMEngine does."""

    def __init__(self, runner: AnyRunner, saved: Dict) -> None:
        self.runner = runner
        self.saved = saved
        self.loop, self._loader = runner.train_loop, loader_of(runner.train_loop)
        self._accelerator, self._device = rank_device()
        self._devices = rank_devices()
        self._inexact: List[str] = []
        #: What was saved of this rank.
        self._mine: Optional[Dict] = None
        if saved['world_size'] == get_world_size():
            self._mine = saved['ranks'][get_rank()]
        else:
            self._inexact.append(
                f'the checkpoint is of {saved["world_size"]} rank(s) and this job has '
                f'{get_world_size()}'
            )
        #: Whether random states are restored only before the next epoch begins.
        self._between_epochs = saved['batch'] < 0

    def prepare(self) -> None:
        """Restore all but random states, which follow when the position in the data is reached."""
        self._restore_buffers()
        restore_loaders(self.runner, self.saved.get('loaders') or {})
        restore_hook_states(self.runner, self.saved.get('hooks') or {})
        loader = self._loader
        source = stateful_part(loader)
        batches = make_resumable(loader, self.runner.seed)
        skip, drop = self._batches_to_skip()
        if source is not None and self._mine is not None and self.saved.get('data'):
            source.load_state_dict(self.saved['data'][get_rank()])
            self._begin_at(skip)
            if not self._between_epochs:
                if not at_next_start(loader, self._start_then_restore):
                    self.restore_random_state()
            elif source is loader:
                # It starts the pass that has ended, and then the next one.
                at_next_start(loader, start_silently)
        elif batches is None:
            if skip:
                self._inexact.append('the data loader has no batch sampler that can skip batches')
            self.restore_random_state()
        else:
            config = getattr(self.runner, '_train_dataloader', None)
            renew_sampler(loader, config, self.saved['sampler_seed'])
            if batches.seed is not None:
                seed_workers(batches, self.runner.seed)
            batches.state_at_start = None if self._mine is None else self._mine['at_start']
            self._resume_batches(batches, skip, drop)
        if self._inexact:
            log_warning(
                f'Resuming, but not exactly: {"; ".join(self._inexact)}. Random numbers, and '
                f'maybe the order of the data, differ from those of an uninterrupted run.'
            )

    def _restore_buffers(self) -> None:
        if self._mine is None:
            return
        models = [unwrap_model(self.runner.model), *_averaged_models(self.runner)]
        of_models = [self.saved.get('buffers'), *self.saved.get('averaged_buffers', ())]
        for model, saved in zip(models, of_models):
            if saved is not None and not restore_buffers(
                model, self._accelerator, saved[get_rank()]
            ):
                self._inexact.append('the model has other buffers than the checkpoint')

    def _resume_batches(self, batches: ResumableBatches, skip: int, drop: int) -> None:
        if self._between_epochs:
            batches.epoch = self.saved['epoch'] - 1
            return
        batches.resume(
            self.saved['epoch'],
            skip,
            self._restore_start_of_epoch,
            self.restore_random_state,
            drop,
        )
        self._begin_at(skip)

    def _begin_at(self, skip: int) -> None:
        """Let the loop go on with the first batch of the loader, which is not that of a pass."""
        if isinstance(self.loop, IterBasedTrainLoop):
            self.loop.dataloader_iterator = ResumedIterator(
                self._loader, self.saved['epoch'], _batches_dropped(self.loop)
            )
            self.loop.dataloader_iterator.begun = ReadStart(
                self.loop.iter, self.saved['epoch'], skip
            )
        elif isinstance(self.loop, EpochBasedTrainLoop) and skip:
            number_batches_from(self.loop, skip)

    def _batches_to_skip(self) -> Tuple[int, int]:
        """Return the batches that were trained on, of this job's size, and samples of the next."""
        trained = max(0, self.saved['batch'])
        before = (self.saved['batch_size'] or 1) * self.saved['world_size']
        mine, ranks = batch_size_of(self._loader) or 1, get_world_size()
        batches = resumable_batches(self._loader)
        plain = batches is None or type(batches.batches) is BatchSampler
        if trained and not plain and self._mine is None:
            self._inexact.append(
                f'{type(batches.batches).__name__} forms other batches than on '
                f'{self.saved["world_size"]} rank(s)'
            )
        if before == mine * ranks:
            return trained, 0
        skip, rest = divmod(trained * before // ranks, mine)
        # Samplers deal samples out to the ranks in turn. One sample alone would be too few for
        # batch norm.
        drop = min(rest, max(0, mine - 2)) if plain and batches is not None else 0
        if trained:
            self._inexact.append(
                f'batches had {before} samples on all ranks together and have {mine * ranks} now; '
                f'continuing after {(skip * mine + drop) * ranks} of {trained * before} samples '
                f'of this epoch'
            )
        return skip, drop

    def _start_then_restore(self, loader: DataLoader) -> Any:
        """Start an iterator, which draws a random number, also to continue a pass."""
        iterator = loader._get_iterator()
        self.restore_random_state()
        return iterator

    def _restore_start_of_epoch(self) -> None:
        """Prepare the sampler for its first pass."""
        # Not earlier: DistSamplerSeedHook sets the epoch of the loop, which is always 0 in one
        # over iterations.
        sampler = sampler_of(self._loader)
        if hasattr(sampler, 'set_epoch'):
            sampler.set_epoch(self.saved['epoch'])
        if self._mine is not None and self._mine['at_start'] is not None:
            set_host_random_state(self._mine['at_start'])

    def restore_random_state(self) -> None:
        """Restore the random states of this rank."""
        if self._mine is None:
            return
        left = set_random_state(self._mine['random'], self._accelerator, self._devices)
        if left is not None:
            log_warning(
                f'Random numbers on {self._device} differ from those of an uninterrupted run: '
                f'{left}.'
            )

    def begin_epoch(self) -> None:
        """Restore random states if the run was interrupted between two epochs."""
        if self._between_epochs:
            self._between_epochs = False
            if had_switched_pipeline(self.saved.get('hooks') or {}):
                # The hook has switched once more, which has replaced the loader's iterator.
                restart_workers_silently(self._loader)
            self.restore_random_state()

    def validate_if_due(self) -> None:
        """Validate if the checkpoint was saved before the validation that was due."""
        if not validation_follows(self.runner):
            return
        if isinstance(self.loop, EpochBasedTrainLoop) and not self._between_epochs:
            return
        self.runner.logger.info(
            'Validating first: the checkpoint was saved before the validation that followed, and '
            'has no results of it.'
        )
        # Validation draws random numbers too, and training goes on after them.
        self.restore_random_state()
        self.runner.val_loop.run()
        if self._mine is not None:
            self._mine['random'] = random_state(self._accelerator, self._devices)


def validation_follows(runner: AnyRunner) -> bool:
    """Whether training is where a validation comes next."""
    loop = runner.train_loop
    if runner.val_loop is None or _progress(loop) is None:
        return False
    loop._decide_current_val_interval()
    count, last = _progress(loop)
    return count >= loop.val_begin and (count % loop.val_interval == 0 or count == last)


def is_complete(runner: AnyRunner) -> bool:
    """Whether the loop has trained as many epochs or iterations as the config asks for."""
    progress = _progress(runner.train_loop)
    return progress is not None and progress[0] >= progress[1]


def _progress(loop: BaseLoop) -> Optional[Tuple[int, int]]:
    """How many epochs or iterations were trained, and of how many; None for an unknown loop."""
    if isinstance(loop, EpochBasedTrainLoop):
        return loop.epoch, loop.max_epochs
    if isinstance(loop, IterBasedTrainLoop):
        return loop.iter, loop.max_iters
    return None


def _averaged_models(runner: AnyRunner) -> List[nn.Module]:
    """The moving averages of the model that hooks such as EMAHook keep."""
    kept = (getattr(hook, 'ema_model', None) for hook in runner.hooks)
    return [model for model in kept if isinstance(model, nn.Module)]


def _batches_dropped(loop: Any) -> int:
    """How many batches a resuming IterBasedTrainLoop takes from its iterator and drops.

    MMEngine 0.10.0 drops none, nor does OneDL's, which calls ``skip_iter`` of the iterator.
    """
    if hasattr(_InfiniteDataloaderIterator, 'skip_iter'):
        return 0
    constants = map(str, IterBasedTrainLoop.run.__code__.co_consts)
    return loop.iter if any('Advance dataloader' in text for text in constants) else 0
