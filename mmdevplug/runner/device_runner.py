"""MMEngine's Runner on any accelerator: sets up device, model wrapper, hooks and patches."""

import os
from contextlib import nullcontext
from functools import partial
from typing import Any, Callable, Dict, List, Optional, Union

from mmengine.config import Config
from mmengine.dist import is_main_process
from mmengine.fileio import join_path
from mmengine.hooks import Hook
from mmengine.logging import MMLogger
from mmengine.model import is_model_wrapper
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.registry import LOG_PROCESSORS, RUNNERS
from mmengine.runner import BaseLoop, LogProcessor, Priority, Runner
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from mmdevplug.accelerators.environment_report import describe_devices
from mmdevplug.checkpoint.job import Job, begin_job
from mmdevplug.checkpoint.load_model import load_checkpoint
from mmdevplug.checkpoint.reading import find_resume_point
from mmdevplug.checkpoint.resume import Resume
from mmdevplug.checkpoint.saving import save_checkpoint
from mmdevplug.config.accelerator import AcceleratorOptions
from mmdevplug.config.runner_config import import_custom_modules, prepare_config, refuse_misspelt
from mmdevplug.data import make_resumable
from mmdevplug.data.checking import build_loader, check_train_loop
from mmdevplug.device_guard.explain import explain_cuda
from mmdevplug.distributed.waiting import wait_for_everyone
from mmdevplug.fault_tolerance.failure import enter_phase, fail_together
from mmdevplug.gradients.wrapper_arguments import refuse_frozen
from mmdevplug.hooks.default_hooks import missing_hooks, replace_hook
from mmdevplug.hooks.preemption_hook import PreemptionHook
from mmdevplug.model.sparse_gradients import check_sparse_gradients
from mmdevplug.optim.adapt_config import adapt_optim_wrapper_cfg, check_optimizers, warn_of_fp16
from mmdevplug.patches.autocast import prepare_compiling
from mmdevplug.patches.torch_load import trust_classes
from mmdevplug.registry import with_ours
from mmdevplug.utils.annotations import Stateful
from mmdevplug.utils.brief_terminal import shorten_terminal
from mmdevplug.utils.model import unwrap_model

from .choose_placement import choose_placement
from .device_iter_loop import ours_of_loop
from .explain_errors import current_group, explained
from .init_device import init_from_options


@RUNNERS.register_module()
class DeviceRunner(Runner):
    """MMEngine's runner on any accelerator.

    It starts the process group itself, moves the model to this rank's device before wrapping it,
    initializes weights on the host or the device, and resumes on any release of PyTorch. All else
    is MMEngine's.

    Args:
        accelerator (str, dict or Accelerator, optional): The accelerator, and options of ours,
            e.g. ``dict(type='gcu', backend='gloo')``: see
            :class:`mmdevplug.config.accelerator.AcceleratorOptions`.
        model_parallel (dict or bool, optional): Whether and how the model is spread over several
            devices: options of :class:`mmdevplug.config.model_parallel.ModelParallelOptions`.
        sharding (dict or bool, optional): Whether and how the model is sharded over the ranks:
            options of :class:`mmdevplug.config.sharding.ShardingOptions`.
        *args: See :class:`mmengine.runner.Runner`.
        **kwargs: The same. What is None above is the key of that name in ``cfg``.

    Examples:
        >>> cfg.runner_type = 'DeviceRunner'
        >>> cfg.accelerator = dict(type='cpu')
        >>> RUNNERS.build(cfg).train()
    """

    #: What is lost where a subclass has a method of its own that does not call ``super()``.
    promises = dict(
        setup_env='the process group is not started for the device of the config',
        set_randomness='random generators of the device may not be seeded',
        build_logger='the log does not say where the job runs',
        build_log_processor='the log may lack the memory that the device uses',
        wrap_model='the model is neither moved to its device nor wrapped by ours',
        _init_model_weights='ranks may begin with other weights, and sharded ones are not set',
        build_optim_wrapper='the optimizer wrapper may not suit the device',
        build_train_loop='a resumed run does not go on where it was',
        register_hook='hooks of MMEngine are not replaced by ours',
        load_or_resume='a restarted job does not resume',
        load_checkpoint='checkpoints may run code, and a resumed run is not exact',
        resume='a resumed run is not exact',
        save_checkpoint='checkpoints are not written atomically, and hold no sharded weights',
        train='an error of one rank does not end the others',
        val='an error of one rank does not end the others',
        test='an error of one rank does not end the others',
    )
    optim_wrapper: Any
    param_schedulers: object
    _has_loaded: bool
    #: The training job, while and after it trains.
    job: Optional[Job] = None
    _is_placeable = False

    def __init__(
        self,
        *args: object,
        accelerator: Optional[Union[str, Dict]] = None,
        model_parallel: Union[None, bool, Dict] = None,
        sharding: Union[None, bool, Dict] = None,
        **kwargs: Any,
    ) -> None:
        cfg = kwargs.get('cfg') or {}
        refuse_misspelt(cfg)
        accelerator = cfg.get('accelerator') if accelerator is None else accelerator
        self.accelerator_options = AcceleratorOptions.from_config(accelerator)
        #: Saved with each checkpoint, and restored when resuming.
        self.resume_state = Resume()
        self.resume_state.participants.note_loaders(self)
        # MMEngine's default is backend='nccl'.
        kwargs.setdefault('env_cfg', {})
        device = self.accelerator_options.device
        #: Where the weights of the model are.
        self.placement = choose_placement(model_parallel, sharding, device, args, kwargs)
        super().__init__(*args, **kwargs)
        self._register_missing_hooks()  # a subclass may register hooks in its own way

    @classmethod
    def from_cfg(cls, cfg: Config) -> 'DeviceRunner':
        """Build a runner from a config; see :meth:`mmengine.runner.Runner.from_cfg`."""
        import_custom_modules(cfg)
        return super().from_cfg(prepare_config(cfg))

    # set-up -------------------------------------------------------------------------------------

    def setup_env(self, env_cfg: Dict) -> None:
        """Start the process group on this rank's device, then do the rest as MMEngine does."""
        self.device_context = init_from_options(
            self._launcher, self.accelerator_options, self.placement, env_cfg
        )
        self.process_group = current_group()
        trust_classes(self.cfg.get('checkpoint_classes') or ())
        super().setup_env(env_cfg)

    def set_randomness(self, seed: Optional[int] = None, *args: object, **kwargs: object) -> None:
        """Seed as MMEngine does, and the accelerator's own generators too."""
        super().set_randomness(seed, *args, **kwargs)
        self.device_context.accelerator.manual_seed(self._seed)

    def build_logger(self, *args: object, **kwargs: object) -> MMLogger:
        """Build the logger and say in one line where this job runs and why."""
        logger = super().build_logger(*args, **kwargs)
        logger.info(self.device_context.describe())
        shorten_terminal(logger, os.path.join(self._log_dir, f'{self.timestamp}.log'))
        warn_of_fp16(self.cfg)
        self.placement.log(logger)
        return logger

    def build_log_processor(self, log_processor: Union[LogProcessor, Dict]) -> LogProcessor:
        """Build the log processor, MMEngine's with the memory column of any accelerator."""
        return super().build_log_processor(with_ours(LOG_PROCESSORS, log_processor, LogProcessor))

    def _log_env(self, env_cfg: Dict) -> None:
        """Log the environment as MMEngine does, and all devices of the accelerator."""
        super()._log_env({**env_cfg, **describe_devices(self.device_context.accelerator)})

    def register_hooks(
        self, default_hooks: Optional[Dict] = None, custom_hooks: Optional[List] = None
    ) -> None:
        """Register hooks as MMEngine does, and ours where there are none of their kind."""
        super().register_hooks(default_hooks, custom_hooks)
        self._register_missing_hooks()

    def _register_missing_hooks(self) -> None:
        for hook in missing_hooks(self.accelerator_options, self.device_context, self._hooks):
            self.register_hook(hook)

    # the model ----------------------------------------------------------------------------------

    def build_model(self, model: Union[nn.Module, Dict]) -> nn.Module:
        """Build the model as its placement needs it."""
        with fail_together('building the model'), explain_cuda(self.device_context.device):
            self._check_placement()
            return self.placement.build(partial(super().build_model, model))

    def _check_placement(self) -> None:
        """Refuse what cannot be placed: before the model is built, or else when it is wrapped."""
        if not self._is_placeable:
            self.placement, self._is_placeable = self.placement.check(self), True

    def wrap_model(self, model_wrapper_cfg: Optional[Dict], model: nn.Module) -> nn.Module:
        """Move the model to this rank's device and wrap it if the job is distributed.

        With the option ``pad_to`` it pads batches to a few sizes.
        """
        with fail_together('wrapping the model'):
            self._check_placement()
            if self.accelerator_options.pad_to is not None:
                from mmdevplug.data.padding import install_padding

                install_padding(model, self.accelerator_options.pad_to)
            if is_model_wrapper(model) and self.placement.whole:
                return super().wrap_model(model_wrapper_cfg, model)
            return self.placement.place(model, self, model_wrapper_cfg)

    def _init_model_weights(self) -> None:
        """Initialize weights where the config says, and make them equal on all ranks."""
        self.placement.initialize(unwrap_model(self.model), self)

    def _maybe_compile(self, target: str) -> None:
        """Compile as MMEngine does, if the config says so, but not our own functions."""
        if self.cfg.get('compile'):
            prepare_compiling(self.device_context.accelerator, self.optim_wrapper)
        super()._maybe_compile(target)

    # the optimizer ------------------------------------------------------------------------------

    def build_optim_wrapper(
        self, optim_wrapper: Union[Optimizer, OptimWrapper, Dict]
    ) -> Union[OptimWrapper, OptimWrapperDict]:
        """Build the optimizer wrapper that suits the device, and refuse what cannot work there."""
        if self.device_context.backend is not None and not is_model_wrapper(self.model):
            refuse_frozen(self.model)
        cfg = adapt_optim_wrapper_cfg(optim_wrapper, self.device_context.accelerator)
        built = super().build_optim_wrapper(cfg)
        self.placement.watch(built, unwrap_model(self.model))
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
        """Build a data loader that can start in the middle of an epoch."""
        build = partial(Runner.build_dataloader, dataloader, seed, diff_rank_seed)
        return build_loader(build, dataloader, seed)

    def build_train_loop(self, loop: Union[BaseLoop, Dict]) -> BaseLoop:
        """Build the loop; see :meth:`mmengine.runner.Runner.build_train_loop`."""
        # An iteration-based loop reads from the loader when it is built.
        make_resumable(self._train_dataloader, self.seed)
        built = super().build_train_loop(ours_of_loop(loop))
        check_train_loop(built)
        return built

    # checkpoints --------------------------------------------------------------------------------

    def add_participant(self, name: str, thing: Stateful) -> None:
        """Save the state of something with each checkpoint, and restore it when resuming.

        Args:
            name (str): The same in every run of a config.
            thing (object): With ``state_dict()`` and ``load_state_dict(state)``; each rank saves
                its own. A hook that has these methods takes part by itself.
        """
        self.resume_state.participants.add(name, thing)

    def register_hook(
        self, hook: Union[Hook, Dict], priority: Optional[Union[str, int, Priority]] = None
    ) -> None:
        """Register a hook, ours in place of some of MMEngine's: see ``hooks/default_hooks.py``."""
        super().register_hook(replace_hook(hook), priority)
        self.placement.check_hooks(self)

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
        """Save a checkpoint atomically; see :meth:`mmengine.runner.Runner.save_checkpoint`.

        If the file cannot be written, an earlier one of that name stays.
        """
        path = join_path(out_dir, filename, backend_args=backend_args)
        rest = save_optimizer, save_param_scheduler, meta, by_epoch
        if file_client_args is not None and is_main_process():  # names other backends
            super().save_checkpoint(out_dir, filename, file_client_args, *rest)
            return
        save_checkpoint(self, path, *rest, backend_args)

    def load_or_resume(self) -> None:
        """Load or resume; see :meth:`mmengine.runner.Runner.load_or_resume`.

        A job that torchrun or Slurm has restarted resumes from its last checkpoint. Damaged
        checkpoints are named in the log, and the newest that is whole is taken. With
        ``resume='auto'``, ``load_from`` counts while there is none.
        """
        if self._has_loaded:
            return
        found = find_resume_point(self)
        self._resume = found is not None  # MMEngine's EMAHook reads it
        if found is None:
            super().load_or_resume()
        else:
            self.resume(found)
            self._has_loaded = True

    def load_checkpoint(
        self,
        filename: str,
        map_location: Union[str, Callable] = 'cpu',
        strict: bool = False,
        revise_keys: list = [(r'^module.', '')],  # noqa: B006  MMEngine's signature
    ) -> Dict:
        """Load a checkpoint as MMEngine does, but without running code from it, or refuse it."""
        checkpoint = load_checkpoint(self, filename, map_location, strict, revise_keys)
        self._has_loaded = True
        self.logger.info(f'Load checkpoint from {filename}')
        return checkpoint

    def resume(
        self,
        filename: str,
        resume_optimizer: bool = True,
        resume_param_scheduler: bool = True,
        map_location: Union[str, Callable] = 'default',
    ) -> None:
        """Resume; see :meth:`mmengine.runner.Runner.resume`.

        By default the file is read to the host: PyTorch cannot load to every device, and the
        states are copied to the device of the parameters in any case.
        """
        location = 'cpu' if map_location == 'default' else map_location
        exactly = resume_optimizer and resume_param_scheduler
        with self.resume_state.resuming(self, filename) if exactly else nullcontext():
            super().resume(filename, resume_optimizer, resume_param_scheduler, location)

    # runs ---------------------------------------------------------------------------------------

    def train(self) -> nn.Module:
        """Train; an error of one rank ends all ranks, and their messages name it."""
        try:
            with explained(self, 'train'):
                enter_phase('data preparation')
                self.resume_state.note_schedulers(self.param_schedulers)
                self.job = begin_job(self)
                model = super().train()
                wait_for_everyone('end of training')
        finally:
            for hook in self.hooks:
                if isinstance(hook, PreemptionHook):
                    hook.end_training()
        enter_phase('after training')
        return model

    def val(self) -> dict:
        """Validate; see :meth:`train`."""
        with explained(self, 'val'):
            return super().val()

    def test(self) -> dict:
        """Test; see :meth:`train`."""
        with explained(self, 'test'):
            return super().test()
