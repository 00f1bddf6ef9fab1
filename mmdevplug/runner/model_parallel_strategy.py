"""Train a model over several devices with MMEngine's FlexibleRunner."""

from typing import Any, Dict, Optional, Union

from mmengine.model import is_model_wrapper
from mmengine.registry import STRATEGIES
from torch import nn

from mmdevplug.model_parallel.options import read_options
from mmdevplug.model_parallel.parallelism import Parallelism

from .device_strategy import DeviceStrategy


@STRATEGIES.register_module()
class ModelParallelStrategy(DeviceStrategy):
    """Spreads the model of each process over several devices.

    FlexibleRunner gives a strategy its model after the devices are chosen, so the plan is made
    when the model is wrapped, and ``enable=None`` goes by the number of devices alone.

    Args:
        model_parallel (dict or bool, optional): See
            :class:`mmdevplug.model_parallel.options.ModelParallelOptions`. Defaults to None: as
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
        self.parallelism = Parallelism(read_options(options), optimizer=optimizer)
        super().__init__(**kwargs)

    def _wrap_model(self, model: nn.Module) -> nn.Module:
        if is_model_wrapper(model):
            return model
        wrapped = self.parallelism.guard(super()._wrap_model(model))
        self.logger.info(f'Training strategy\n{self.parallelism.describe()}')
        return wrapped
