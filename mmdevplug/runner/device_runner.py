"""The runner: the one place where the pieces meet."""

import os
import re
from typing import Any, Callable, Dict, List, Optional, Union

from mmengine.dist import is_main_process
from mmengine.hooks import Hook
from mmengine.logging import MMLogger
from mmengine.model import is_model_wrapper
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.registry import RUNNERS
from mmengine.runner import BaseLoop, LogProcessor, Priority, Runner
from mmengine.runner.checkpoint import _load_checkpoint_to_model
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from mmdevplug.accelerators.environment_report import describe_devices
from mmdevplug.checkpoint.collecting import collect_checkpoint
from mmdevplug.checkpoint.finding import check_file, find_good_checkpoint, mark_start
from mmdevplug.checkpoint.host_copy import HostCopy
from mmdevplug.checkpoint.reading import read_checkpoint
from mmdevplug.checkpoint.work_dir_lock import check_work_dir
from mmdevplug.checkpoint.writing import is_local, join, write_checkpoint
from mmdevplug.config.accelerator import AcceleratorOptions
from mmdevplug.config.model_parallel import ModelParallelOptions
from mmdevplug.config.prepare import prepare_config
from mmdevplug.data import make_resumable
from mmdevplug.data.checking import check_batches, check_samples, explain_empty
from mmdevplug.data.padding import build_padded
from mmdevplug.data.worker_signals import keep_workers_from_signals
from mmdevplug.distributed.process_group import DeviceContext
from mmdevplug.distributed.waiting import run_on_main
from mmdevplug.environments.launch import restarts
from mmdevplug.errors import CheckpointError
from mmdevplug.explanations.cuda_settings import describe_serious
from mmdevplug.explanations.explain import explained, explained_build, train_together
from mmdevplug.explanations.versions import explain_versions
from mmdevplug.fault_tolerance.failure import fail_together
from mmdevplug.hooks.default_hooks import missing_hooks, replace_hook
from mmdevplug.model.prepare import initialize_weights, place_model
from mmdevplug.model.sparse_gradients import check_sparse_gradients
from mmdevplug.model_parallel.parallelism import Parallelism
from mmdevplug.optim import adapt_optim_wrapper_cfg, check_optimizers, join_consolidation
from mmdevplug.patches.mmengine import patch_mmengine
from mmdevplug.patches.torch_load import trust_classes
from mmdevplug.utils.model import unwrap_model

from .device_log_processor import device_log_processor
from .init_device import init_device
from .torch_compile import keep_from_tracing


@RUNNERS.register_module()
class DeviceRunner(Runner):
    """MMEngine's runner on any accelerator.

    It starts the process group itself, moves the model to this rank's device before wrapping it,
    initializes weights on the host, and resumes on any release of PyTorch. Everything else is
    MMEngine's.

    Args:
        *args: See :class:`mmengine.runner.Runner`.
        accelerator (str, dict or Accelerator, optional): The accelerator (see
            :func:`mmdevplug.get_accelerator`), and options of ours, e.g. ``dict(type='gcu',
            backend='gloo')``: see :class:`mmdevplug.config.accelerator.AcceleratorOptions`.
            Defaults to None: the key ``accelerator`` of ``cfg``.
        model_parallel (dict or bool, optional): Whether and how the model is spread over several
            devices: options of :class:`mmdevplug.config.model_parallel.ModelParallelOptions`.
            Defaults to None: the key ``model_parallel`` of ``cfg``.
        **kwargs: See :class:`mmengine.runner.Runner`.

    Examples:
        >>> cfg.runner_type = 'DeviceRunner'
        >>> cfg.accelerator = dict(type='cpu')
        >>> RUNNERS.build(cfg).train()
    """

    def __init__(
        self,
        *args: Any,
        accelerator: Optional[Union[str, Dict]] = None,
        model_parallel: Union[None, bool, Dict] = None,
        **kwargs: Any,
    ) -> None:
        cfg = kwargs.get('cfg')
        check_work_dir(kwargs['work_dir'] if 'work_dir' in kwargs else args[1])
        if accelerator is None and cfg is not None:
            accelerator = cfg.get('accelerator')
        self.accelerator_options = AcceleratorOptions.from_config(accelerator)
        # MMEngine's default asks for nccl, which nobody asked for.
        kwargs.setdefault('env_cfg', {})
        if model_parallel is None and cfg is not None:
            model_parallel = cfg.get('model_parallel')
        self.parallelism = Parallelism(
            ModelParallelOptions.from_config(model_parallel),
            kwargs['model'] if 'model' in kwargs else next(iter(args), None),
            _optimizer_of(kwargs.get('optim_wrapper')),
            kwargs.get('default_scope') or 'mmengine',
        )
        super().__init__(*args, **kwargs)

    @classmethod
    def from_cfg(cls, cfg: Any) -> 'DeviceRunner':
        """Build a runner from a config; see :meth:`mmengine.runner.Runner.from_cfg`."""
        with explain_versions():
            return super().from_cfg(prepare_config(cfg))

    # set-up -------------------------------------------------------------------------------------

    def setup_env(self, env_cfg: Dict) -> None:
        """Start the process group on this rank's device, then do the rest as MMEngine does.

        Args:
            env_cfg (dict): See :meth:`mmengine.runner.Runner.setup_env`.

        Raises:
            DevPlugError: If the accelerator, the launch variables or the backend are wrong, on
                this rank or another.
        """
        dist_cfg = dict(env_cfg.get('dist_cfg') or {})
        options = self.accelerator_options
        self.device_context = init_device(
            self._launcher,
            options.device,
            forced_backend=options.backend,
            heartbeat_timeout=options.heartbeat_timeout,
            mmcv_ops=options.mmcv_ops,
            compilation_cache=options.compilation_folder(self.work_dir),
            choose_devices=self.parallelism.choose_devices if self.parallelism.wanted else None,
            **dist_cfg,
        )
        if self.device_context.backend is not None:
            # What runs is what the log shows.
            env_cfg['dist_cfg'] = dict(dist_cfg, backend=self.device_context.backend)
        patch_mmengine()
        trust_classes(self.cfg.get('checkpoint_classes') or [])
        super().setup_env(env_cfg)

    def set_randomness(
        self,
        seed: Optional[int] = None,
        diff_rank_seed: bool = False,
        deterministic: bool = False,
    ) -> None:
        """Seed as MMEngine does, and the accelerator's own generators too."""
        super().set_randomness(seed, diff_rank_seed, deterministic)
        self.device_context.accelerator.manual_seed(self._seed)

    def build_logger(self, *args: Any, **kwargs: Any) -> MMLogger:
        """Build the logger and say in one line where this job runs and why."""
        logger = super().build_logger(*args, **kwargs)
        logger.info(self.device_context.describe())
        for setting in describe_serious(self.cfg, self.device_context.device.type):
            logger.warning(setting)
        if self.parallelism.wanted:
            logger.info(f'Training strategy\n{self.parallelism.describe()}')
        return logger

    def build_log_processor(self, log_processor: Union[LogProcessor, Dict]) -> LogProcessor:
        """Build the log processor, with the memory column of any accelerator."""
        return super().build_log_processor(device_log_processor(log_processor))

    def _log_env(self, env_cfg: Dict) -> None:
        """Log the environment as MMEngine does, and all devices of the accelerator."""
        super()._log_env({**env_cfg, **describe_devices(self.device_context.accelerator)})

    def register_hooks(
        self, default_hooks: Optional[Dict] = None, custom_hooks: Optional[List] = None
    ) -> None:
        """Register hooks as MMEngine does, and ours where there are none of their kind."""
        super().register_hooks(default_hooks, custom_hooks)
        world_size = self.device_context.env.world_size
        for hook in missing_hooks(self.accelerator_options, world_size, self._hooks):
            self.register_hook(hook)

    # the model ----------------------------------------------------------------------------------

    def build_model(self, model: Union[nn.Module, Dict]) -> nn.Module:
        """Build the model; see :meth:`mmengine.runner.Runner.build_model`.

        With ``pad_to``, in ``model.data_preprocessor`` or in ``accelerator``, its data
        preprocessors pad batches to few sizes.
        """
        with explained_build(self, 'building the model'):
            return build_padded(super().build_model, model, self.accelerator_options.pad_to)

    def wrap_model(self, model_wrapper_cfg: Optional[Dict], model: nn.Module) -> nn.Module:
        """Move the model to this rank's device and wrap it if the job is distributed.

        Args:
            model_wrapper_cfg (dict, optional): See :meth:`mmengine.runner.Runner.wrap_model`.
            model (nn.Module): The model.

        Returns:
            nn.Module: The model, wrapped in a distributed job.
        """
        if is_model_wrapper(model):
            return super().wrap_model(model_wrapper_cfg, model)
        with fail_together('wrapping the model'):
            placed = place_model(
                model,
                self.device_context,
                model_wrapper_cfg,
                sync_bn=self.cfg.get('sync_bn'),
                find_unused_parameters=self.cfg.get('find_unused_parameters', False),
                spread=self._spread if self.parallelism.wanted else None,
            )
            return self.parallelism.guard(placed)

    def _spread(self, model: nn.Module) -> nn.Module:
        return self.parallelism.place(model, self.device_context)

    def _init_model_weights(self) -> None:
        """Initialize weights on the host and make them equal on all ranks."""
        model = unwrap_model(self.model)
        initialize_weights(model, self.device_context)

    def _maybe_compile(self, target: str) -> None:
        """Compile as MMEngine does, if the config says so, but not our own functions."""
        if self.cfg.get('compile'):
            keep_from_tracing()
        super()._maybe_compile(target)

    # the optimizer ------------------------------------------------------------------------------

    def build_optim_wrapper(
        self, optim_wrapper: Union[Optimizer, OptimWrapper, Dict]
    ) -> Union[OptimWrapper, OptimWrapperDict]:
        """Build the optimizer wrapper that suits the device.

        Args:
            optim_wrapper (OptimWrapper or dict): See
                :meth:`mmengine.runner.Runner.build_optim_wrapper`. ``OptimWrapper`` becomes
                :class:`mmdevplug.optim.DeviceOptimWrapper` on a lazy device, and
                ``AmpOptimWrapper`` becomes :class:`mmdevplug.optim.DeviceAmpOptimWrapper` where
                MMEngine's own refuses the device.

        Returns:
            OptimWrapper or OptimWrapperDict: As built by MMEngine.

        Raises:
            ModelError: If the optimizer cannot work with the process group, or the device with
                the model's sparse gradients.
        """
        cfg = adapt_optim_wrapper_cfg(optim_wrapper, self.device_context.accelerator)
        built = super().build_optim_wrapper(cfg)
        check_optimizers(built, self.device_context)
        check_sparse_gradients(self.model, self.device_context)
        return built

    # data ---------------------------------------------------------------------------------------

    @staticmethod
    def build_dataloader(
        dataloader: Union[DataLoader, Dict],
        seed: Optional[int] = None,
        diff_rank_seed: bool = False,
    ) -> DataLoader:
        """Build a data loader that can begin in the middle of an epoch.

        See :meth:`mmengine.runner.Runner.build_dataloader`.
        """
        with explain_empty(dataloader):
            loader = Runner.build_dataloader(dataloader, seed, diff_rank_seed)
        check_samples(loader, dataloader)
        make_resumable(loader, seed)
        keep_workers_from_signals(loader)
        return loader

    def build_train_loop(self, loop: Union[BaseLoop, Dict]) -> BaseLoop:
        """Build the loop; see :meth:`mmengine.runner.Runner.build_train_loop`."""
        # Before an iteration-based loop begins to read from it.
        make_resumable(self._train_dataloader, self.seed)
        built = super().build_train_loop(loop)
        check_batches(built, 'train_dataloader')
        return built

    # checkpoints --------------------------------------------------------------------------------

    def register_hook(
        self, hook: Union[Hook, Dict], priority: Optional[Union[str, int, Priority]] = None
    ) -> None:
        """Register a hook, ours in the place of some of MMEngine's.

        See :meth:`mmengine.runner.Runner.register_hook` and :mod:`mmdevplug.hooks.default_hooks`.
        """
        safe = self.accelerator_options.safe_checkpoints
        super().register_hook(replace_hook(hook, safe), priority)

    def save_checkpoint(
        self,
        out_dir: str,
        filename: str,
        file_client_args: Optional[Dict] = None,
        save_optimizer: bool = True,
        save_param_scheduler: bool = True,
        meta: Optional[Dict] = None,
        by_epoch: bool = True,
        backend_args: Optional[Dict] = None,
    ) -> None:
        """Save a checkpoint, whole or not at all.

        See :meth:`mmengine.runner.Runner.save_checkpoint`. Tensors leave the device in one call.

        Raises:
            CheckpointError: If the file cannot be written; one of that name is as it was.
        """
        if save_optimizer and not is_main_process():
            join_consolidation(self.optim_wrapper)
        if not is_main_process():
            return
        if file_client_args is not None:
            super().save_checkpoint(
                out_dir,
                filename,
                file_client_args,
                save_optimizer,
                save_param_scheduler,
                meta,
                by_epoch,
            )
            return
        checkpoint = collect_checkpoint(self, save_optimizer, save_param_scheduler, meta, by_epoch)
        on_host = HostCopy(self.device_context.accelerator)(checkpoint)
        write_checkpoint(on_host, join(out_dir, filename, backend_args), backend_args)

    save_checkpoint.collects_as_mmengine = True  # type: ignore[attr-defined]

    def load_or_resume(self) -> None:
        """Load or resume; see :meth:`mmengine.runner.Runner.load_or_resume`.

        A job that torchrun or Slurm has started again resumes by itself from what it has saved.
        Where a checkpoint is looked for, the newest that is whole is taken, and those that are not
        are named in the log.

        Raises:
            CheckpointError: If no checkpoint is whole.
        """
        if self._has_loaded:
            return
        found = run_on_main('finding the checkpoint to resume from', self._find_checkpoint)
        if found is not None:
            _check_shared(found, self.device_context)
            self._resume = True  # what MMEngine's EMAHook asks for
            self.resume(found)
            self._has_loaded = True
        elif self._load_from is not None:
            super().load_or_resume()
        elif self._resume:
            self.logger.info(
                f'No checkpoint in {self.work_dir} yet: training starts from scratch.'
            )

    def _find_checkpoint(self) -> Optional[str]:
        count = restarts(self._launcher)
        if count > 0:
            found = find_good_checkpoint(self.work_dir, only_this_run=True)
            self.logger.info(
                f'This is restart {count} of this job, '
                + ('which has saved nothing yet.' if found is None else f'resuming from {found}.')
            )
            if found is not None:
                return found
        else:
            mark_start(self.work_dir)
        if not self._resume:
            return None
        if self._load_from is None:
            return find_good_checkpoint(self.work_dir)
        if os.path.isfile(self._load_from):
            check_file(self._load_from)
        elif re.match(r'\w+://', self._load_from) is None:
            raise CheckpointError(
                f'resume=True and load_from={self._load_from!r}: there is no such file. Correct '
                f'the path, or remove load_from to resume from the newest in {self.work_dir}.'
            )
        return self._load_from

    def load_checkpoint(
        self,
        filename: str,
        map_location: Union[str, Callable] = 'cpu',
        strict: bool = False,
        revise_keys: list = [(r'^module.', '')],  # noqa: B006  MMEngine's signature
    ) -> Dict:
        """Load a checkpoint without running code from it.

        Args:
            filename (str): See :meth:`mmengine.runner.Runner.load_checkpoint`.
            map_location (str or callable): Defaults to ``'cpu'``; the weights are copied to the
                model's device from there.
            strict (bool): Defaults to False.
            revise_keys (list): Defaults to stripping ``module.``.

        Returns:
            dict: The checkpoint.

        Raises:
            DevPlugError: If the file holds objects of classes that are not MMEngine's.
        """
        checkpoint = read_checkpoint(filename, map_location)
        # As MMEngine's own method from here on.
        self.call_hook('after_load_checkpoint', checkpoint=checkpoint)
        model = unwrap_model(self.model)
        checkpoint = _load_checkpoint_to_model(model, checkpoint, strict, revise_keys=revise_keys)
        self._has_loaded = True
        self.logger.info(f'Load checkpoint from {filename}')
        self.device_context.materialize()
        return checkpoint

    def resume(
        self,
        filename: str,
        resume_optimizer: bool = True,
        resume_param_scheduler: bool = True,
        map_location: Union[str, Callable] = 'default',
    ) -> None:
        """Resume; see :meth:`mmengine.runner.Runner.resume`.

        The default location is the host: PyTorch cannot load to every device, and the states are
        copied to where the model's parameters are in any case.
        """
        location = 'cpu' if map_location == 'default' else map_location
        super().resume(filename, resume_optimizer, resume_param_scheduler, location)

    # runs ---------------------------------------------------------------------------------------

    def train(self) -> nn.Module:
        """Train; an error of one rank ends all of them with its name.

        Meanwhile no other job can train in the same work directory.

        Raises:
            CheckpointError: If another job trains there.
        """
        return train_together(self, super().train)

    def val(self) -> dict:
        """Validate; see :meth:`train`."""
        with explained(self, 'val'):
            return super().val()

    def test(self) -> dict:
        """Test; see :meth:`train`."""
        with explained(self, 'test'):
            return super().test()


def _check_shared(path: str, context: DeviceContext) -> None:
    """Refuse a checkpoint that rank 0 has found and this rank cannot see."""
    if is_local(path) and not os.path.exists(path):
        raise CheckpointError(
            f'rank 0 resumes from {path}, which is not there for {context.env.describe()}. Put '
            f'the work directory on a file system that all hosts share, under the same path, or '
            f'copy the file to every host.'
        )


def _optimizer_of(optim_wrapper: Any) -> Optional[Dict]:
    """The config of the optimizer, where there is one and it is one."""
    return optim_wrapper.get('optimizer') if isinstance(optim_wrapper, dict) else None
