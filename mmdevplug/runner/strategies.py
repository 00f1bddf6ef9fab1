"""Strategies of MMEngine's FlexibleRunner: data parallel, and one model on several devices."""

import copy
from functools import partial
from typing import Any, Callable, Dict, Optional, Tuple, Union

from mmengine._strategy import DDPStrategy
from mmengine.dist import is_main_process
from mmengine.model import is_model_wrapper
from mmengine.optim import BaseOptimWrapper
from mmengine.registry import STRATEGIES
from torch import nn
from torch.optim import Optimizer

from mmdevplug.accelerators.environment_report import describe_devices
from mmdevplug.checkpoint.fit_weights import explaining_other_run, load_model
from mmdevplug.checkpoint.optimizer_settings import Length
from mmdevplug.checkpoint.reading import read_for_model
from mmdevplug.checkpoint.resume_settings import ResumeSettings, list_optimizers
from mmdevplug.config.accelerator import AcceleratorOptions
from mmdevplug.config.model_parallel import ModelParallelOptions
from mmdevplug.data.padding import build_padded
from mmdevplug.errors import DevPlugError
from mmdevplug.model.prepare import place_model
from mmdevplug.model.sparse_gradients import check_sparse_gradients
from mmdevplug.model_parallel.apply_options import Parallelism
from mmdevplug.optim import adapt_optim_wrapper_cfg, check_optimizers, join_consolidation
from mmdevplug.registry import import_parts
from mmdevplug.utils.model import unwrap_model

from .global_batch import refuse_for_flexible_runner
from .init_device import init_from_options


@STRATEGIES.register_module()
class DeviceStrategy(DDPStrategy):
    """Do for ``FlexibleRunner`` what :class:`mmdevplug.DeviceRunner` does.

    It works in single processes and in distributed jobs, in a
    :class:`mmdevplug.runner.DeviceFlexibleRunner`.

    Args:
        accelerator (str or dict, optional): As the key ``accelerator`` of DeviceRunner, with all
            of its options. A dict without ``backend`` means ``backend='auto'``, because
            FlexibleRunner asks for nccl when a config says nothing. Defaults to None: detection.
        **kwargs: See :class:`mmengine._strategy.DDPStrategy`.

    Examples:
        >>> strategy = dict(type='DeviceStrategy', accelerator='xla')
        >>> DeviceFlexibleRunner(model=..., strategy=strategy)
    """

    #: One device for each process.
    parallelism = Parallelism(ModelParallelOptions(enable=False))
    #: What to do with a checkpoint that is resumed, once its weights are loaded.
    _compare: Optional[Callable[[Dict[str, Any]], None]] = None
    #: Whether the runner is :class:`mmdevplug.runner.DeviceFlexibleRunner`.
    has_runner = False
    #: What of the loaded weights does not fit the model.
    misfit: Optional[str] = None

    def __init__(
        self, *, accelerator: Optional[Union[str, Dict]] = None, **kwargs: object
    ) -> None:
        import_parts()
        self.given_accelerator = accelerator
        self.accelerator_options = AcceleratorOptions.from_config(accelerator, backend='auto')
        super().__init__(**kwargs)

    def _setup_env(
        self, *, launcher: Optional[str] = None, dist_cfg: Optional[dict] = None, **kwargs: object
    ) -> None:
        launcher = launcher or 'none'
        refuse_for_flexible_runner(self.accelerator_options, launcher)
        # MMEngine starts no second process group.
        self.device_context = init_from_options(
            launcher, self.accelerator_options, self.parallelism, self._work_dir, dist_cfg or {}
        )
        super()._setup_env(launcher=launcher, dist_cfg=dist_cfg, **kwargs)
        self.device_context.accelerator.manual_seed(self._seed)

    def build_model(self, model: Union[nn.Module, Dict]) -> nn.Module:
        """Build the model; see :meth:`mmdevplug.DeviceRunner.build_model`."""
        return build_padded(super().build_model, model, self.accelerator_options.pad_to)

    def collect_env(self) -> Tuple[dict, dict]:
        """Collect what MMEngine reports of the environment, and all devices of the accelerator.

        Runners ask as they are built.

        Raises:
            DevPlugError: If it is MMEngine's FlexibleRunner, which lacks our hooks.
        """
        if not self.has_runner:
            raise DevPlugError(
                f"{type(self).__name__} is in MMEngine's FlexibleRunner, which has none of our "
                f"hooks. Expected runner_type='DeviceFlexibleRunner', or in a script "
                f'mmdevplug.runner.DeviceFlexibleRunner.'
            )
        system, runtime = super().collect_env()
        return system, {**runtime, **describe_devices(self.device_context.accelerator)}

    def _wrap_model(self, model: nn.Module) -> nn.Module:
        if is_model_wrapper(model):
            return model
        self.logger.info(self.device_context.describe())
        return place_model(
            model,
            self.device_context,
            self.model_wrapper,
            self.sync_bn,
            spread=partial(self.parallelism.place, context=self.device_context)
            if self.parallelism.wanted
            else None,
            host_losses=self.accelerator_options.host_losses,
        )

    def build_optim_wrapper(
        self,
        optim_wrapper: Union[Optimizer, BaseOptimWrapper, dict],
        model: Optional[nn.Module] = None,
    ) -> BaseOptimWrapper:
        """See :meth:`mmdevplug.DeviceRunner.build_optim_wrapper`."""
        cfg = adapt_optim_wrapper_cfg(optim_wrapper, self.device_context.accelerator)
        built = super().build_optim_wrapper(cfg, model)
        check_optimizers(built, self.device_context)
        check_sparse_gradients(self.model if model is None else model, self.device_context)
        return built

    def save_checkpoint(
        self, filename: str, *, save_optimizer: bool = True, **kwargs: object
    ) -> None:
        """Save a checkpoint; see :meth:`mmengine._strategy.DDPStrategy.save_checkpoint`."""
        if save_optimizer and not is_main_process() and hasattr(self, 'optim_wrapper'):
            join_consolidation(self.optim_wrapper)
        super().save_checkpoint(filename, save_optimizer=save_optimizer, **kwargs)

    def build_param_scheduler(self, scheduler: object, *args: object, **kwargs: object) -> Any:
        """Build schedulers; see :meth:`mmengine._strategy.BaseStrategy.build_param_scheduler`."""
        self._scheduler_config = copy.deepcopy(scheduler)
        return super().build_param_scheduler(scheduler, *args, **kwargs)

    def resume(
        self,
        filename: str,
        *,
        resume_optimizer: bool = True,
        resume_param_scheduler: bool = True,
        callback: Optional[Callable] = None,
        **kwargs: object,
    ) -> dict:
        """Resume, with the settings that ``accelerator.resume_settings`` chooses."""
        chosen = dict(
            resume_optimizer=resume_optimizer, resume_param_scheduler=resume_param_scheduler
        )
        if not all(chosen.values()):
            return super().resume(filename, callback=callback, **chosen, **kwargs)
        schedulers = getattr(self, 'param_schedulers', None)
        config = schedulers and self._scheduler_config
        max_epochs = self.dispatch_kwargs.get('max_epochs')
        settings = ResumeSettings(
            list_optimizers(self.optim_wrapper, schedulers, config),
            Length(
                max_epochs,
                self.dispatch_kwargs.get('max_iters'),
                self.dispatch_kwargs.get('epoch_length', 1),
            ),
            (max_epochs or 1) > 1,  # it is 1 in a loop over iterations
            self.accelerator_options.resume_settings,
            'auto_scale_lr' if (self._auto_scale_lr or {}).get('enable') else None,
        )

        def compare(checkpoint: Dict[str, Any]) -> None:
            settings.compare(checkpoint, filename, self._work_dir)
            if schedulers:
                checkpoint.setdefault('param_schedulers', type(schedulers)())

        self._compare = compare
        try:
            with explaining_other_run(filename):
                checkpoint = super().resume(filename, callback=callback, **chosen, **kwargs)
        finally:
            self._compare = None
        settings.apply()
        return checkpoint

    def load_checkpoint(
        self,
        filename: str,
        *,
        map_location: Union[str, Callable] = 'cpu',
        strict: bool = False,
        revise_keys: list = [(r'^module.', '')],  # noqa: B006  MMEngine's signature
        callback: Optional[Callable] = None,
    ) -> dict:
        """Load a checkpoint without running code from it, by default to the host."""
        self.logger.info(f'Load checkpoint from {filename}')
        checkpoint = read_for_model(filename, 'cpu' if map_location == 'default' else map_location)
        # As in DeviceRunner.load_checkpoint.
        self.device_context.materialize()
        if callback is not None:
            callback(checkpoint)
        self.misfit = load_model(
            unwrap_model(self.model),
            checkpoint,
            filename,
            strict,
            revise_keys,
            resuming=self._compare is not None,
        )
        if self._compare is not None:
            self._compare(checkpoint)
        del checkpoint['state_dict']
        return checkpoint

    def convert_model(self, model: nn.Module) -> nn.Module:
        """Leave layers to :func:`mmdevplug.model.prepare.place_model`."""
        return model


@STRATEGIES.register_module()
class ModelParallelStrategy(DeviceStrategy):
    """Spread the model of each process over several devices.

    FlexibleRunner passes the model after the devices are chosen, so the plan is made when the
    model is wrapped, and ``enable=None`` depends on the number of devices only.

    Args:
        model_parallel (dict or bool, optional): See
            :class:`mmdevplug.config.model_parallel.ModelParallelOptions`. Defaults to None: as
            True.
        optimizer (dict, optional): ``optim_wrapper.optimizer`` of the config, for the size of its
            state in the plan. Defaults to None: AdamW's.
        **kwargs: See :class:`DeviceStrategy`.

    Examples:
        >>> strategy = dict(type='ModelParallelStrategy', accelerator='xla',
        ...                 model_parallel=dict(devices=4))
        >>> DeviceFlexibleRunner(model=..., strategy=strategy)
    """

    def __init__(
        self,
        *,
        model_parallel: Union[None, bool, Dict] = None,
        optimizer: Optional[Dict] = None,
        **kwargs: object,
    ) -> None:
        options = True if model_parallel is None else model_parallel
        if isinstance(options, dict):
            options = dict(dict(enable=True), **options)
        self.parallelism = Parallelism(
            ModelParallelOptions.from_config(options), optimizer=optimizer
        )
        super().__init__(**kwargs)

    def _wrap_model(self, model: nn.Module) -> nn.Module:
        if is_model_wrapper(model):
            return model
        wrapped = self.parallelism.guard(super()._wrap_model(model))
        self.parallelism.log(self.logger)
        return wrapped
