"""The runner: the one place where the pieces meet."""

from typing import Any, Callable, Dict, List, Optional, Union

from mmengine.dist import is_main_process
from mmengine.logging import MMLogger
from mmengine.model import is_model_wrapper
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.registry import RUNNERS
from mmengine.runner import Runner
from mmengine.runner.checkpoint import _load_checkpoint_to_model
from torch import nn
from torch.optim import Optimizer

from mmdevplug.device.detection import accelerator_options
from mmdevplug.dist import fail_together, init_device
from mmdevplug.hooks import CommunicationHook, DeviceHook
from mmdevplug.model.checkpoint import read_checkpoint
from mmdevplug.model.placing import initialize_weights, place_model
from mmdevplug.optim import (
    adapt_optim_wrapper_cfg,
    check_optimizers,
    join_consolidation,
    serve_autocast,
)

from .compiling import keep_from_tracing
from .config import prepare_config


@RUNNERS.register_module()
class DeviceRunner(Runner):
    """MMEngine's runner on any accelerator.

    It starts the process group itself, moves the model to this rank's device before wrapping it,
    initializes weights on the host, and resumes on any release of PyTorch. Everything else is
    MMEngine's.

    Args:
        *args: See :class:`mmengine.runner.Runner`.
        accelerator (str or dict, optional): ``dict(type='gcu', backend='gloo')``: the accelerator
            (see :func:`mmdevplug.get_accelerator`), and a backend that wins over
            ``env_cfg.dist_cfg``: a name, or ``'auto'`` to use that of ``env_cfg`` only where it
            suits the device. ``hook=dict(...)`` holds arguments of :class:`DeviceHook`, and
            ``monitor=False`` leaves out :class:`CommunicationHook`. Defaults to None: the key
            ``accelerator`` of ``cfg``.
        **kwargs: See :class:`mmengine.runner.Runner`.

    Examples:
        >>> cfg.runner_type = 'DeviceRunner'
        >>> cfg.accelerator = dict(type='cpu')
        >>> RUNNERS.build(cfg).train()
    """

    def __init__(
        self, *args: Any, accelerator: Optional[Union[str, Dict]] = None, **kwargs: Any
    ) -> None:
        cfg = kwargs.get('cfg')
        if accelerator is None and cfg is not None:
            accelerator = cfg.get('accelerator')
        self._accelerator_cfg = accelerator_options(accelerator)
        self._hook_cfg = self._accelerator_cfg.pop('hook', {})
        self._monitored = self._accelerator_cfg.pop('monitor', True)
        # MMEngine's default asks for nccl, which nobody asked for.
        kwargs.setdefault('env_cfg', {})
        super().__init__(*args, **kwargs)

    @classmethod
    def from_cfg(cls, cfg: Any) -> 'DeviceRunner':
        """Build a runner from a config; see :meth:`mmengine.runner.Runner.from_cfg`."""
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
        options = dict(self._accelerator_cfg)
        forced = options.pop('backend', None)
        dist_cfg = dict(env_cfg.get('dist_cfg') or {})
        self.device_context = init_device(
            self._launcher, options, forced_backend=forced, **dist_cfg
        )
        if self.device_context.backend is not None:
            # What runs is what the log shows.
            env_cfg['dist_cfg'] = dict(dist_cfg, backend=self.device_context.backend)
        serve_autocast(self.device_context.accelerator)
        super().setup_env(env_cfg)

    def set_randomness(
        self, seed: Optional[int], diff_rank_seed: bool = False, deterministic: bool = False
    ) -> None:
        """Seed as MMEngine does, and the accelerator's own generators too."""
        super().set_randomness(seed, diff_rank_seed, deterministic)
        self.device_context.accelerator.manual_seed(self._seed)

    def build_logger(self, *args: Any, **kwargs: Any) -> MMLogger:
        """Build the logger and say in one line where this job runs and why."""
        logger = super().build_logger(*args, **kwargs)
        logger.info(self.device_context.describe())
        return logger

    def register_hooks(
        self, default_hooks: Optional[Dict] = None, custom_hooks: Optional[List] = None
    ) -> None:
        """Register hooks as MMEngine does, and ours where there are none of their kind."""
        super().register_hooks(default_hooks, custom_hooks)
        if not any(isinstance(hook, DeviceHook) for hook in self._hooks):
            self.register_hook(DeviceHook(**self._hook_cfg))
        present = any(isinstance(hook, CommunicationHook) for hook in self._hooks)
        if self._monitored and self.device_context.env.world_size > 1 and not present:
            self.register_hook(CommunicationHook())

    # the model ----------------------------------------------------------------------------------

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
            return place_model(
                model,
                self.device_context,
                model_wrapper_cfg,
                sync_bn=self.cfg.get('sync_bn'),
                find_unused_parameters=self.cfg.get('find_unused_parameters', False),
            )

    def _init_model_weights(self) -> None:
        """Initialize weights on the host and make them equal on all ranks."""
        model = self.model.module if is_model_wrapper(self.model) else self.model
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
            ModelError: If the optimizer cannot work with the process group.
        """
        cfg = adapt_optim_wrapper_cfg(optim_wrapper, self.device_context.accelerator)
        built = super().build_optim_wrapper(cfg)
        check_optimizers(built, self.device_context)
        return built

    # checkpoints --------------------------------------------------------------------------------

    def save_checkpoint(self, *args: Any, save_optimizer: bool = True, **kwargs: Any) -> None:
        """Save a checkpoint; see :meth:`mmengine.runner.Runner.save_checkpoint`."""
        if save_optimizer and not is_main_process():
            join_consolidation(self.optim_wrapper)
        super().save_checkpoint(*args, save_optimizer=save_optimizer, **kwargs)

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
        model = self.model.module if is_model_wrapper(self.model) else self.model
        checkpoint = _load_checkpoint_to_model(model, checkpoint, strict, revise_keys=revise_keys)
        self._has_loaded = True
        self.logger.info(f'Load checkpoint from {filename}')
        self.device_context.accelerator.materialize(self.device_context.device)
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
        """Train; an error of one rank ends all of them with its name."""
        with fail_together('train'):
            return super().train()

    def val(self) -> dict:
        """Validate; see :meth:`train`."""
        with fail_together('val'):
            return super().val()

    def test(self) -> dict:
        """Test; see :meth:`train`."""
        with fail_together('test'):
            return super().test()
