"""Save a checkpoint of a runner: on rank 0, in the background, or by the runner's own method."""

import os
import time
from concurrent.futures import Future, wait
from contextlib import suppress
from contextvars import ContextVar
from functools import lru_cache, partial
from inspect import Parameter, signature
from itertools import chain, count
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import mmengine
from mmengine.config import Config
from mmengine.dist import get_rank, is_main_process
from mmengine.fileio import get_file_backend
from mmengine.hooks import CheckpointHook, EMAHook
from mmengine.model import is_model_wrapper
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.runner import EpochBasedTrainLoop, Runner
from mmengine.utils import ManagerMixin
from torch import nn
from torch.optim import Optimizer

from mmdevplug.accelerators import rank_context
from mmdevplug.config.checkpoint import CheckpointOptions
from mmdevplug.config.fields import refuse_unknown
from mmdevplug.distributed.byte_exchange import gather_json
from mmdevplug.distributed.waiting import run_on_main
from mmdevplug.errors import CheckpointError
from mmdevplug.fault_tolerance.failure import before_abort
from mmdevplug.model.placement import placement_of
from mmdevplug.optim.adapt_config import join_consolidation
from mmdevplug.utils.annotations import (
    AnyOptimWrapper,
    AnyRunner,
    AnyScheduler,
    Checkpoint,
    StateDict,
)
from mmdevplug.utils.loops import loader_of
from mmdevplug.utils.model import unwrap_model
from mmdevplug.utils.signals import start_thread

from . import writing
from .host_copy import copy_to_host
from .job import note_saved
from .reading import is_finished, read_pointer
from .shard_files import sums_of_rank

#: How long an aborting process waits for a checkpoint that is being written, in seconds.
ABORT_SECONDS = 5.0


class BackgroundWriter:
    """Run one function at a time in a thread, which the interpreter waits for when it exits."""

    _running: Optional[Future] = None

    def start(self, function: Callable[[], None]) -> None:
        """Start a function after the one before; raise the error of that one."""
        self.join()
        running = self._running = Future()

        def run() -> None:
            try:
                function()
                running.set_result(None)
            except BaseException as error:
                running.set_exception(error)

        # No executor: Python 3.8 waits for its threads only after the watch for failures has
        # stopped, and the other ranks would take this one for dead.
        start_thread(run, 'mmdevplug-checkpoint', daemon=False)

    def join(self, timeout: Optional[float] = None) -> bool:
        """Wait, raise the function's error once, and return whether nothing runs any more."""
        running = self._running
        if running is not None:
            if wait([running], timeout).not_done:
                return False
            self._running = None
            running.result()
        return True


class CheckpointSaver:
    """Save checkpoints of a runner, as the options of its hook say."""

    def __init__(self, options: CheckpointOptions, backend_args: Optional[Dict] = None) -> None:
        self.options, self.backend_args = options, backend_args
        if options.async_save:
            self._background = BackgroundWriter()
            before_abort(lambda: self._background.join(ABORT_SECONDS))

    def save(self, runner: AnyRunner, path: str, outdated: Sequence[str], **options: Any) -> None:
        """Save by the runner's own method, or begin to in the background. All ranks take part.

        A failure raises CheckpointError on rank 0 and RankFailedError on the others.

        Args:
            runner (Runner): The runner.
            path (str): Where to write it.
            outdated (list[str]): Checkpoints to remove once it is on the disk.
            options: Further arguments of ``runner.save_checkpoint``; with ``names_it``, whether
                ``last_checkpoint`` is to name it.
        """
        names_it, (folder, name) = options.pop('names_it', True), os.path.split(path)
        options['backend_args'] = self.backend_args
        save = partial(runner.save_checkpoint, folder, name, **options)
        if type(runner).save_checkpoint is Runner.save_checkpoint:  # a stock one
            save = partial(save_checkpoint, runner, path, **options)
        finish = partial(self._finish, runner, path, outdated, names_it)
        if is_main_process():
            run_on_main(f'saving {name}', lambda: self._write(save, finish))
        else:
            save()
            run_on_main(f'saving {name}', list)

    def _write(self, save: Callable[[], None], finish: Callable[[], None]) -> None:
        """Save, and finish when the file is there, which may be later."""
        later: List[Callable[[], None]] = []

        def copy(checkpoint: Checkpoint, path: str, backend_args: Optional[Dict]) -> None:
            self._background.join()  # frees the copy of the checkpoint before
            copied = copy_to_host(checkpoint, rank_context().accelerator, keep=True)
            later.append(partial(writing.write_checkpoint, copied, path, backend_args))

        token = _WRITE.set(copy if self.options.async_save else write_at_once)
        try:
            save()
        finally:
            _WRITE.reset(token)
        if later:

            def write() -> None:
                later[0]()
                finish()

            self._background.start(write)
        else:
            finish()

    def _finish(
        self, runner: AnyRunner, path: str, outdated: Sequence[str], names_it: bool
    ) -> None:
        """Name a checkpoint that is on the disk, then remove others."""
        pointer = Path(runner.work_dir) / writing.POINTER
        backend = get_file_backend(path, backend_args=self.backend_args)
        if names_it:
            if not writing.is_local(path) and getattr(runner, 'job', None) is not None:
                note_saved(runner.work_dir, path)
            writing.write_text(path, pointer)
        for old in outdated:
            if old != path and backend.isfile(old):
                backend.remove(old)
                writing.remove_shards(old)
            elif old != path and backend.isdir(old):
                backend.rmtree(old)  # as DeepSpeed saves them

    def prepare(self, runner: AnyRunner, folder: str, complete: bool) -> bool:
        """Make the folder of checkpoints on rank 0; return whether the run in it has ended.

        Args:
            runner (Runner): Of any rank; all take part.
            folder (str): Where checkpoints go.
            complete (bool): Whether nothing is left to train.
        """
        prepare = partial(self._prepare, runner, folder, complete)
        return run_on_main('preparing the folder of checkpoints', prepare)

    def _prepare(self, runner: AnyRunner, folder: str, complete: bool) -> bool:
        if writing.is_local(folder, self.backend_args):
            writing.make_folder(folder)
            left = writing.remove_unfinished(folder)
            if left:
                runner.logger.info(f'Removed {left} unfinished checkpoint(s) from {folder}.')
        finished = is_finished(runner.work_dir)
        if not complete:
            with suppress(OSError):  # missing; a stale one does no harm
                (Path(runner.work_dir) / writing.FINISHED).unlink()
        return finished

    def note_finished(self, runner: AnyRunner) -> None:
        """Note that the run of a folder has ended, with which checkpoint."""
        if not is_main_process():
            return
        try:
            ended_with = read_pointer(runner.work_dir) or ''
            writing.write_text(ended_with, Path(runner.work_dir) / writing.FINISHED)
        except CheckpointError as error:
            runner.logger.warning(f'{error} Resuming this run will validate once more.')

    def finish(self) -> None:
        """Wait for the background; raise its error."""
        if self.options.async_save:
            run_on_main('writing the last checkpoint', self._background.join)


def check_arguments(runner: AnyRunner, given: Mapping[str, object]) -> None:
    """Refuse arguments of a checkpoint hook that ``runner.save_checkpoint`` does not take."""
    if not given:
        return
    taken = signature(runner.save_checkpoint).parameters
    known = [*CheckpointOptions.names(), *signature(CheckpointHook).parameters, *taken]
    if not any(parameter.kind is Parameter.VAR_KEYWORD for parameter in taken.values()):
        refuse_unknown(given, known, CheckpointOptions.key, CheckpointError)


def save_checkpoint(
    runner: AnyRunner,
    path: str,
    save_optimizer: bool = True,
    save_param_scheduler: bool = True,
    meta: Optional[Dict[str, object]] = None,
    by_epoch: bool = True,
    backend_args: Optional[Dict[str, object]] = None,
) -> None:
    """Save what ``Runner.save_checkpoint`` of MMEngine does, atomically; all ranks call it."""
    if not is_main_process():
        join_collecting(runner, save_optimizer, path)
        return
    options = save_optimizer, save_param_scheduler, meta, by_epoch, path
    _WRITE.get()(collect_checkpoint(runner, *options), path, backend_args)


def write_at_once(checkpoint: Checkpoint, path: str, backend_args: Optional[Dict]) -> None:
    """Write what was collected."""
    writing.write_checkpoint(
        copy_to_host(checkpoint, rank_context().accelerator), path, backend_args
    )


#: The function that writes a collected checkpoint, now or in the background.
_WRITE: 'ContextVar[Callable[..., None]]' = ContextVar('_WRITE', default=write_at_once)


def collect_checkpoint(
    runner: AnyRunner,
    save_optimizer: bool = True,
    save_param_scheduler: bool = True,
    meta: Optional[Dict[str, object]] = None,
    by_epoch: bool = True,
    path: Optional[str] = None,
) -> Checkpoint:
    """Collect what ``Runner.save_checkpoint`` of MMEngine writes, tensors where they are.

    Sharded ones are gathered, or written beside ``path``: other ranks call
    :func:`join_collecting`.
    """
    hub = runner.message_hub.state_dict()
    # MMEngine would warn of each log value that is not saved.
    saved = filter(hub['resumed_keys'].get, hub['resumed_keys'])
    checkpoint: Checkpoint = {
        'meta': _meta(runner, dict(meta or {}), by_epoch),
        'state_dict': weights_of(runner.model),
        'message_hub': dict(hub, resumed_keys=dict.fromkeys(saved, True)),
    }
    optimizers = by_name(runner.optim_wrapper, runner.param_schedulers, None)
    if save_optimizer:
        if not isinstance(runner.optim_wrapper, OptimWrapper):
            raise CheckpointError(
                f'optim_wrapper is of type {type(runner.optim_wrapper).__name__}; expected an '
                f'OptimWrapper. Save without it: default_hooks.checkpoint.save_optimizer=False.'
            )
        checkpoint['optimizer'] = runner.optim_wrapper.state_dict()
        checkpoint['meta']['kinds'] = {
            name: dict(kinds_of(wrapper, schedulers), parameters=list(chain.from_iterable(names)))
            for name, wrapper, schedulers, _ in optimizers
            for names in [names_in_groups(runner.model, wrapper.optimizer)]
        }
    if save_param_scheduler and runner.param_schedulers is None:
        runner.logger.warning('There are no parameter schedulers, so none are saved.')
    elif save_param_scheduler:
        states = {name: [_state_of(one) for one in each or ()] for name, _, each, _ in optimizers}
        checkpoint['param_schedulers'] = states.get('', states)
    _collect_states(runner, checkpoint, path)
    runner.call_hook('before_save_checkpoint', checkpoint=checkpoint)
    return checkpoint


def _state_of(scheduler: Any) -> object:
    # MMEngine takes all attributes. mmagic's ReduceLR holds a MessageHub, which no file may hold.
    state: object = scheduler.state_dict()
    if not isinstance(state, dict):
        return state
    return {key: value for key, value in state.items() if not isinstance(value, ManagerMixin)}


def weights_of(model: nn.Module) -> StateDict:
    """Return ``state_dict()`` of a model, which may override it.

    Children may be wrapped, too: their names are saved without ``module.``.
    """
    inner = unwrap_model(model)
    state = inner.state_dict()
    releases = getattr(state, '_metadata', {})  # of modules, by their names
    wrapped = [name for name, part in inner.named_modules() if name and is_model_wrapper(part)]
    for name in sorted(wrapped, key=len, reverse=True):
        before = f'{name}.module'
        for named in (state, releases):
            for key in [each for each in named if f'{each}.'.startswith(f'{before}.')]:
                named[f'{name}{key[len(before) :]}'] = named.pop(key)
    return state


def join_collecting(runner: AnyRunner, save_optimizer: bool, path: str) -> None:
    """Send what is sharded to rank 0, or write it, on ranks that save no checkpoint."""
    if save_optimizer:
        join_consolidation(runner.optim_wrapper)
    if not placement_of(runner).whole:
        checkpoint = dict(state_dict=weights_of(runner.model))
        if save_optimizer:
            checkpoint['optimizer'] = runner.optim_wrapper.state_dict()
        _collect_states(runner, checkpoint, path)
        for hook in runner.hooks:
            if isinstance(hook, EMAHook):
                hook.ema_model.state_dict()  # gathers, as the hook of rank 0 does


def _collect_states(runner: AnyRunner, checkpoint: Checkpoint, path: Optional[str]) -> None:
    placement, folder = placement_of(runner), None
    if path is not None and placement.writes_shards:
        if not writing.is_local(path):
            raise CheckpointError(
                f'sharding.sharded_checkpoint=True, and checkpoints go to {path}: expected a '
                f'folder of a file system. Set default_hooks.checkpoint.out_dir, or leave the '
                f'option out.'
            )
        # Shards of a file that this one replaces stay until it is written.
        base = f'{os.path.splitext(path)[0]}.{writing.SHARDS}'
        names = chain([base], (f'{base}-{number}' for number in count(1)))
        folder = str(gather_json(next(name for name in names if not os.path.exists(name)))[0])
        checkpoint[writing.SHARDS] = os.path.basename(folder)
    for part in filter(checkpoint.__contains__, ('state_dict', 'optimizer')):
        checkpoint[part] = placement.collect(checkpoint[part], folder, part)
    if folder is not None:
        sums = gather_json(sums_of_rank(folder, get_rank()))
        checkpoint[writing.SUMS] = {name: one for each in sums for name, one in each.items()}


def _meta(runner: AnyRunner, meta: Dict[str, object], by_epoch: bool) -> StateDict:
    # MMEngine counts an epoch or an iteration only after the hooks that save it.
    meta.setdefault('epoch', runner.epoch + 1 if by_epoch else runner.epoch)
    meta.setdefault('iter', runner.iter if by_epoch else runner.iter + 1)
    meta.update(
        cfg=_pretty_text(runner.cfg, repr(runner.cfg)),
        seed=runner.seed,
        experiment_name=runner.experiment_name,
        time=time.strftime('%Y%m%d_%H%M%S', time.localtime()),
        mmengine_version=mmengine.__version__,
        job=getattr(getattr(runner, 'job', None), 'name', None),
        counts_epochs=isinstance(runner.train_loop, EpochBasedTrainLoop),
    )
    dataset: object = getattr(loader_of(runner.train_loop), 'dataset', None)
    if hasattr(dataset, 'metainfo'):
        meta['dataset_meta'] = dataset.metainfo
    return meta


@lru_cache(maxsize=1)
def _pretty_text(cfg: Config, plain: str) -> str:
    """``cfg.pretty_text``, which takes a tenth of a second, once for each state of the config."""
    return cfg.pretty_text


def by_name(optim_wrapper: AnyOptimWrapper, schedulers: Any, config: Any) -> List[Tuple]:
    """List the optimizers of a runner: name, wrapper, schedulers and the configs of these."""
    if not isinstance(optim_wrapper, OptimWrapperDict):
        return [('', optim_wrapper, schedulers or [], config)]
    named = isinstance(config, Mapping) and 'type' not in config
    return [
        (name, one, (schedulers or {}).get(name, []), config.get(name) if named else config)
        for name, one in optim_wrapper.items()
    ]


def names_in_groups(model: nn.Module, optimizer: Optimizer) -> List[List[str]]:
    """Name the parameters of each group of an optimizer, '' if the model does not have them.

    Names of wrapped modules are those without a wrapper.
    """
    names = {id(one): name.replace('module.', '') for name, one in model.named_parameters()}
    return [[names.get(id(one), '') for one in each['params']] for each in optimizer.param_groups]


def kinds_of(wrapper: AnyOptimWrapper, schedulers: Sequence[AnyScheduler]) -> Dict[str, Any]:
    """Name the classes of an optimizer, or of the one inside of it, and of its schedulers."""
    optimizer = getattr(wrapper.optimizer, 'optim', wrapper.optimizer)
    names = [type(one).__name__ for one in schedulers]
    return dict(optimizer=type(optimizer).__name__, schedulers=names)
