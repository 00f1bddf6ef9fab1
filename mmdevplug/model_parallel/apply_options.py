"""Turn the options of ``model_parallel`` into a strategy, a plan and a dispatched model."""

import functools
from typing import Any, Callable, Dict, Mapping, Optional, Sequence, Union

import torch
from mmengine.logging import MMLogger
from torch import nn

from mmdevplug.accelerators import Accelerator
from mmdevplug.config.model_parallel import PRECISIONS, ModelParallelOptions
from mmdevplug.device_guard import DeviceGuard
from mmdevplug.environments.launch_variables import LaunchEnv
from mmdevplug.errors import PlacementError
from mmdevplug.model.placement import Placement
from mmdevplug.utils.annotations import AnyConfig, AnyRunner
from mmdevplug.utils.model import unwrap_model

from . import DevicePlan, module_sizes, probe_capacities
from .choose_devices import MEMORY_UNKNOWN, TrainingStrategy, resolve_strategy
from .dispatch import dispatch
from .lora_check import check_r_consistency
from .make_plan import PlanOptions, make_plan
from .meta_build import build_without_memory
from .sizes import state_factor

#: AdamW's, where the optimizer of a config cannot be tried alone.
USUAL_STATE = 2.0

STEPS = ('train_step', 'val_step', 'test_step')


class Parallelism(Placement):
    """Chooses the devices of this rank, plans, and places the model.

    ``model``, to plan with before there are devices, is a model, or the config of one, which is
    built without memory in the default ``scope`` of MMEngine; if it is None, the plan is made when
    the model is placed. ``optimizer`` is ``optim_wrapper.optimizer`` of the config, for the size
    of its state; if it is None, AdamW's is taken.

    Attributes:
        strategy (TrainingStrategy, optional): Known after :meth:`choose_devices`.
        plan (DevicePlan, optional): Known with it, unless the model is on one device.
    """

    one_device = False

    def __init__(
        self,
        options: ModelParallelOptions,
        model: object = None,
        optimizer: object = None,
        scope: str = 'mmengine',
    ) -> None:
        self.options = options
        self.strategy: Any = None
        self.plan: Optional[DevicePlan] = None
        self._model, self._scope = model, scope
        factor = state_factor(optimizer)[0]
        self._state_factor = USUAL_STATE if factor is None else factor

    @classmethod
    def from_config(
        cls,
        config: Union[None, bool, Mapping[str, object]],
        model: Union[nn.Module, AnyConfig],
        optim_wrapper: Optional[AnyConfig] = None,
        scope: Optional[str] = None,
    ) -> Optional['Parallelism']:
        """Read the config key ``model_parallel``; None if it asks for one device."""
        options = ModelParallelOptions.from_config(config)
        if options.enable is False:
            return None
        optimizer = optim_wrapper.get('optimizer') if isinstance(optim_wrapper, dict) else None
        return cls(options, model, optimizer, scope or 'mmengine')

    def choose_devices(self, accelerator: Accelerator, env: LaunchEnv) -> Sequence[torch.device]:
        """Resolve the strategy, plan, and return the devices of this rank."""
        planned = self._model
        if planned is not None and not isinstance(planned, nn.Module):
            planned = build_without_memory(planned, self._scope)
            convert_frozen_weights(planned, self.options.precision)
        self.strategy = self._resolve(self.options.enable, accelerator, env, planned)
        if planned is not None and self.strategy.is_model_parallel:
            try:
                self.plan = self._plan(planned, accelerator)
            except PlacementError as error:
                # One device, if none asked for several and nothing says that it is too small.
                if self.options.enable is not None or MEMORY_UNKNOWN not in self.strategy.reason:
                    raise
                why = f'model_parallel.enable=None, and the model cannot be spread: {error}'
                self.strategy = self._resolve(False, accelerator, env)._replace(reason=why)
        self._model = None
        return self.strategy.devices

    def _resolve(
        self,
        enable: Optional[bool],
        accelerator: Accelerator,
        env: LaunchEnv,
        model: Optional[nn.Module] = None,
    ) -> TrainingStrategy:
        options = self.options
        needed = None
        if enable is None and model is not None:
            needed = module_sizes(model, training=True, optimizer=self._state_factor)['']
        return resolve_strategy(
            enable,
            accelerator=accelerator,
            devices=options.devices,
            env=env,
            memory_needed=needed,
            exclude_cpu=options.exclude_cpu,
        )

    def _plan(self, model: nn.Module, accelerator: Accelerator) -> DevicePlan:
        options = self.options
        if options.plan is not None:
            made = DevicePlan.from_dict(options.plan)
            made.check(model)
            return made
        devices, limits = list(map(str, self.strategy.devices)), options.max_memory
        if limits is None:
            limits = probe_capacities(devices, accelerator)
        shared = vars(options).keys() & set(PlanOptions._fields)
        given: Dict[str, Any] = {name: getattr(options, name) for name in shared}
        given.update(max_memory=limits, training=True, optimizer=self._state_factor)
        return make_plan(model, devices, PlanOptions(**given))

    def spread(self, model: nn.Module, runner: AnyRunner) -> nn.Module:
        """Put the bare model, which is on the host, on the devices of this rank, in place."""
        options, strategy = self.options, self.strategy
        accelerator = runner.device_context.accelerator
        if options.check_r_consistency or options.strict_r_check:
            check_r_consistency(model, strict=options.strict_r_check)
        if strategy is None:
            return model
        convert_frozen_weights(model, options.precision)
        if strategy.is_model_parallel:
            if self.plan is None:
                self.plan = self._plan(model, accelerator)
            dispatch(model, self.plan)
        compute_in(model, options.precision, accelerator)
        return model

    def place(
        self, model: nn.Module, runner: AnyRunner, wrapper: Optional[Mapping[str, Any]] = None
    ) -> nn.Module:
        """Spread the model, wrap it, and guard its steps."""
        return self.guard(super().place(model, runner, wrapper))

    def guard(self, model: nn.Module) -> nn.Module:
        """Run the steps of a model that is spread over devices, wrapped or not, under a guard."""
        if self.plan is None or self.options.guard is None:
            return model
        bare = unwrap_model(model)
        watch = GuardedSteps(DeviceGuard(policy=self.options.guard, model=bare))
        for name in STEPS:
            if hasattr(model, name):
                setattr(model, name, functools.partial(watch, model, name))
        return model

    def log(self, logger: MMLogger) -> None:
        """Log the strategy and the plan as a table, and warn of an uneven plan."""
        logger.info(f'Training strategy\n{self.describe()}')
        if self.plan is not None and self.plan.warning:
            logger.warning(self.plan.warning)

    def describe(self) -> str:
        """The strategy and the plan as a table."""
        found = self.strategy
        if found is None:
            return ''
        rows = {
            'strategy': found.kind,
            'why': found.reason,
            'devices of this rank': ', '.join(map(str, found.devices)),
            'processes': f'{found.world_size}, this is rank {found.rank}',
        }
        table = '\n'.join(f'{name:>20}: {value}' for name, value in rows.items())
        return table + ('' if self.plan is None else f'\n{self.plan}')


class GuardedSteps:
    """Runs the steps of a model under a guard, and reports once what the guard moved."""

    def __init__(self, guard: DeviceGuard) -> None:
        self.guard = guard
        self._reported = False

    def __call__(self, model: nn.Module, step: str, *args: object, **kwargs: object) -> object:
        with self.guard:
            result = getattr(type(model), step)(model, *args, **kwargs)
        if self.guard.moved.number and not self._reported:
            self._reported = True
            MMLogger.get_current_instance().info(self.guard.report())
        return result

    def __deepcopy__(self, memo: object) -> 'GuardedSteps':
        # A copy of a model, such as EMA's, is watched by the same guard.
        return self


def convert_frozen_weights(model: nn.Module, precision: Optional[str]) -> None:
    """Convert the frozen floating-point weights of a model, in place, by a key of PRECISIONS."""
    name = PRECISIONS[precision]
    if name is not None:
        for parameter in model.parameters():
            if parameter.is_floating_point() and not parameter.requires_grad:
                parameter.data = parameter.data.to(getattr(torch, name))


def compute_in(model: nn.Module, precision: Optional[str], accelerator: Accelerator) -> None:
    """Run the forward passes of a model in mixed precision, by a key of PRECISIONS."""
    name = PRECISIONS[precision]
    if name in ('bfloat16', 'float16'):
        before = vars(model).get('forward') or functools.partial(type(model).forward, model)
        forward = functools.partial(_forward_in, getattr(torch, name), accelerator, before)
        model.forward = forward


def _forward_in(
    dtype: torch.dtype,
    accelerator: Accelerator,
    forward: Callable,
    *args: object,
    **kwargs: object,
) -> object:
    with accelerator.precision.autocast(dtype=dtype):
        return forward(*args, **kwargs)
