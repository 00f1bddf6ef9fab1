"""Train a model over several devices with MMEngine's FlexibleRunner."""

from typing import Any, Dict, Optional, Union

from mmengine.model import is_model_wrapper
from mmengine.registry import STRATEGIES
from torch import nn

from mmdevplug.config.model_parallel import ModelParallelOptions
from mmdevplug.model_parallel.apply_options import Parallelism

from .device_strategy import DeviceStrategy


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
        >>> FlexibleRunner(model=..., strategy=strategy)
    """

    def __init__(
        self,
        *,
        model_parallel: Union[None, bool, Dict] = None,
        optimizer: Optional[Dict] = None,
        **kwargs: Any,
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
        self.logger.info(f'Training strategy\n{self.parallelism.describe()}')
        return wrapped
