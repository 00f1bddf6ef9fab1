"""Save a checkpoint of a runner: on rank 0, in the background, or by the runner's own method."""

import os
import shutil
import time
from concurrent.futures import Future, wait
from functools import lru_cache
from pathlib import Path
from threading import Thread
from typing import Any, Callable, Dict, List, NamedTuple, Optional

import mmengine
from mmengine.config import Config
from mmengine.dist import is_main_process
from mmengine.fileio import get_file_backend
from mmengine.optim import OptimWrapper
from mmengine.runner import Runner
from mmengine.runner.checkpoint import get_state_dict
from mmengine.utils import get_git_hash

from mmdevplug.accelerators import rank_device
from mmdevplug.config.checkpoint import CheckpointOptions
from mmdevplug.distributed.waiting import run_on_main
from mmdevplug.errors import CheckpointError
from mmdevplug.fault_tolerance.failure import before_abort
from mmdevplug.optim.adapt_config import join_consolidation
from mmdevplug.sharding.states import KEY as SHARDS, collect_states, folder_of
from mmdevplug.utils.annotations import AnyRunner
from mmdevplug.utils.loops import loader_of
from mmdevplug.utils.model import unwrap_model

from .resume_settings import describe_kinds
from .state_copier import StateCopier
from .writing import UNFINISHED, is_local, replacing, write_checkpoint, write_pointer

#: How long an aborting process waits for a checkpoint that is being written, in seconds.
ABORT_SECONDS = 5.0


class CheckpointFile(NamedTuple):
    """A checkpoint to write, and what to do once it is on the disk."""

    path: str
    #: Checkpoints to remove then.
    outdated: List[str]
    #: Whether ``last_checkpoint`` is to name it.
    is_last: bool


class BackgroundWriter:
    """Run one function at a time in a thread, which the interpreter waits for when it exits."""

    def __init__(self) -> None:
        self._running: Optional[Future] = None

    def start(self, function: Callable[[], None]) -> None:
        """Start a function after the one before; raise the error of that one."""
        self.join()
        running = self._running = Future()

        def run() -> None:
            try:
                running.set_result(function())
            except BaseException as error:
                running.set_exception(error)

        # No executor: Python 3.8 waits for its threads only after the watch for failures has
        # stopped, and the other ranks would take this one for dead.
        Thread(target=run, name='mmdevplug-checkpoint', daemon=False).start()

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
        self.options = options
        self.backend_args = backend_args
        self._background = BackgroundWriter()
        self._kept_copy: Optional[StateCopier] = None
        before_abort(lambda: self._background.join(ABORT_SECONDS))

    def save(self, runner: AnyRunner, file: CheckpointFile, meta: Dict, options: Dict) -> None:
        """Save, or begin to in the background. All ranks take part.

        A failure raises CheckpointError on rank 0 and RankFailedError on the others. ``options``
        are further arguments of ``runner.save_checkpoint``.
        """
        if not _collects_as_mmengine(runner):
            self._save_by_runner(runner, file, meta, options)
            return
        if not is_main_process():
            join_collecting(runner, options.get('save_optimizer', True), file.path)
        if self.options.async_save:
            if is_main_process():
                self._start(runner, file, meta, options)
            return

        def write() -> None:
            checkpoint = collect_checkpoint(runner, meta=meta, path=file.path, **options)
            self._put(runner.work_dir, StateCopier(rank_device()[0])(checkpoint), file)

        _run_on_main(file, write)

    def finish(self) -> None:
        """Wait for the background; raise its error."""
        if self.options.async_save:
            run_on_main('writing the last checkpoint', self._background.join)

    def _put(self, work_dir: str, checkpoint: Dict, file: CheckpointFile) -> None:
        write_checkpoint(checkpoint, file.path, self.backend_args)
        self._follow(work_dir, file)

    def _follow(self, work_dir: str, file: CheckpointFile) -> None:
        if file.is_last:
            write_pointer(work_dir, file.path)
        backend = get_file_backend(file.path, backend_args=self.backend_args)
        for path in file.outdated:
            if path == file.path:
                continue
            if backend.isfile(path):
                backend.remove(path)
                shutil.rmtree(folder_of(path), ignore_errors=True)  # mostly there is none
            elif backend.isdir(path):
                backend.rmtree(path)  # as DeepSpeed saves them

    def _start(self, runner: AnyRunner, file: CheckpointFile, meta: Dict, options: Dict) -> None:
        """Copy to host memory, and write the copy in the background."""
        self._background.join()
        if self._kept_copy is None:
            self._kept_copy = StateCopier(rank_device()[0], keep=True)
        found = collect_checkpoint(runner, meta=meta, path=file.path, **options)
        copied = self._kept_copy(found)
        work_dir = runner.work_dir
        self._background.start(lambda: self._put(work_dir, copied, file))

    def _save_by_runner(
        self, runner: AnyRunner, file: CheckpointFile, meta: Dict, options: Dict
    ) -> None:
        """Let a runner with its own method save under a temporary name, then rename the file."""
        folder, name = os.path.split(file.path)
        local = is_local(file.path, self.backend_args)
        given = f'{name}{UNFINISHED}by-runner' if local else name
        runner.save_checkpoint(folder, given, meta=meta, backend_args=self.backend_args, **options)

        def rename() -> None:
            written = os.path.join(folder, given)
            if local and Path(written).is_file():
                with replacing(file.path) as unfinished:
                    os.replace(written, str(unfinished))
            elif local:
                os.replace(written, file.path)  # a folder, of a strategy that makes one
            self._follow(runner.work_dir, file)

        _run_on_main(file, rename)


def _run_on_main(file: CheckpointFile, function: Callable[[], None]) -> None:
    run_on_main(f'saving {os.path.basename(file.path)}', function)


def _collects_as_mmengine(runner: AnyRunner) -> bool:
    """Whether a runner collects a checkpoint as MMEngine's own does."""
    if not isinstance(runner, Runner):
        return False
    method = type(runner).save_checkpoint
    return method is Runner.save_checkpoint or getattr(method, 'collects_as_mmengine', False)


def collect_checkpoint(
    runner: AnyRunner,
    save_optimizer: bool = True,
    save_param_scheduler: bool = True,
    meta: Optional[Dict[str, Any]] = None,
    by_epoch: bool = True,
    path: Optional[str] = None,
) -> Dict[str, Any]:
    """Collect what ``Runner.save_checkpoint`` of MMEngine writes, tensors where they are.

    Sharded ones are gathered, or written beside ``path``: other ranks call
    :func:`join_collecting`.
    """
    if meta is not None and not isinstance(meta, dict):
        raise TypeError(f'meta should be a dict or None, but got {type(meta)}')
    folder = _shards_folder(runner, path)
    # Children may be wrapped, too; their names are saved without `module.`.
    weights = get_state_dict(unwrap_model(runner.model))
    checkpoint: Dict[str, Any] = {
        'meta': _meta(runner, dict(meta or {}), by_epoch),
        'state_dict': collect_states(weights, folder, 'state_dict'),
        'message_hub': runner.message_hub.state_dict(),
    }
    if folder is not None:
        checkpoint[SHARDS] = os.path.basename(folder)
    if save_optimizer:
        if not isinstance(runner.optim_wrapper, OptimWrapper):
            raise CheckpointError(
                f'the optimizer wrapper is of type {type(runner.optim_wrapper).__name__}; '
                f'expected an OptimWrapper or OptimWrapperDict. Save without it: '
                f'default_hooks.checkpoint.save_optimizer=False.'
            )
        state = runner.optim_wrapper.state_dict()
        checkpoint['optimizer'] = collect_states(state, folder, 'optimizer')
        kinds = describe_kinds(runner.optim_wrapper, runner.param_schedulers)
        checkpoint['meta']['kinds'] = kinds
    if save_param_scheduler and runner.param_schedulers is None:
        runner.logger.warning('There are no parameter schedulers, so none are saved.')
    elif save_param_scheduler:
        checkpoint['param_schedulers'] = _scheduler_states(runner.param_schedulers)
    runner.call_hook('before_save_checkpoint', checkpoint=checkpoint)
    return checkpoint


def join_collecting(runner: AnyRunner, save_optimizer: bool, path: str) -> None:
    """Send what is sharded to rank 0, or write it, on ranks that save no checkpoint."""
    if save_optimizer:
        join_consolidation(runner.optim_wrapper)
    if getattr(getattr(runner, 'sharding', None), 'active', False):
        folder = _shards_folder(runner, path)
        collect_states(get_state_dict(unwrap_model(runner.model)), folder, 'state_dict')
        if save_optimizer:
            collect_states(runner.optim_wrapper.state_dict(), folder, 'optimizer')


def _shards_folder(runner: AnyRunner, path: Optional[str]) -> Optional[str]:
    sharding = getattr(runner, 'sharding', None)
    if path is None or sharding is None or not sharding.writes_shards:
        return None
    if not is_local(path):
        raise CheckpointError(
            f'sharding.sharded_checkpoint=True, and checkpoints go to {path}: expected a folder '
            f'of a file system. Set default_hooks.checkpoint.out_dir, or leave the option out.'
        )
    return folder_of(path)


def _meta(runner: AnyRunner, meta: Dict[str, Any], by_epoch: bool) -> Dict[str, Any]:
    # MMEngine counts an epoch or an iteration only after the hooks that save it.
    meta.setdefault('epoch', runner.epoch + 1 if by_epoch else runner.epoch)
    meta.setdefault('iter', runner.iter if by_epoch else runner.iter + 1)
    meta.update(
        cfg=_pretty_text(runner.cfg),
        seed=runner.seed,
        experiment_name=runner.experiment_name,
        time=time.strftime('%Y%m%d_%H%M%S', time.localtime()),
        mmengine_version=_mmengine_version(),
    )
    dataset = getattr(loader_of(runner.train_loop), 'dataset', None)
    if hasattr(dataset, 'metainfo'):
        meta['dataset_meta'] = dataset.metainfo
    return meta


@lru_cache(maxsize=None)
def _mmengine_version() -> str:
    return mmengine.__version__ + get_git_hash()  # which starts a process


_formatted: Dict[str, str] = {}


def _pretty_text(cfg: Config) -> str:
    """``cfg.pretty_text``, which takes a tenth of a second, once for each state of the config."""
    plain = repr(cfg)
    if plain not in _formatted:
        _formatted.clear()
        _formatted[plain] = cfg.pretty_text
    return _formatted[plain]


def _scheduler_states(schedulers: Any) -> Any:
    if isinstance(schedulers, dict):
        return {name: [each.state_dict() for each in some] for name, some in schedulers.items()}
    return [each.state_dict() for each in schedulers]
