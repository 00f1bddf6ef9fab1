"""Place a model on all chips of a host, which one process drives."""

from contextlib import contextmanager
from dataclasses import replace
from typing import Iterator, Mapping, Optional, Sequence, Union

import torch
from mmengine.logging import print_log
from torch import nn

from mmdevplug.accelerators import Accelerator
from mmdevplug.config.sharding import ShardingOptions
from mmdevplug.environments.launch_variables import LaunchEnv
from mmdevplug.errors import LaunchError, ModelError
from mmdevplug.model.place_model import place_model
from mmdevplug.model.placement import Placement
from mmdevplug.utils.annotations import AnyOptimWrapper, AnyRunner

from .batches import SplitBatch, enlarge_batches
from .partition import Chips
from .weights import SplitWeights


class Spmd(Placement):
    """Trains as one process that has one large chip; the compiler divides each graph.

    Args:
        sharding (bool or dict, optional): The config key ``sharding``: False keeps weights whole
            on each chip. Defaults to None: they are divided among the chips, which is faster where
            it was measured, and takes less memory.
    """

    def __init__(self, sharding: Union[None, bool, Mapping[str, object]] = None) -> None:
        self.divides_weights = sharding is not False
        if sharding is not None and sharding is not False:
            _refuse_options(ShardingOptions.from_config(sharding))
        self._weights: Optional[SplitWeights] = None

    def choose_devices(self, accelerator: Accelerator, env: LaunchEnv) -> Sequence[torch.device]:
        """Choose the one device that stands for all chips."""
        if env.world_size > 1:
            raise LaunchError(
                f'accelerator.spmd=True, which sharding=True means on torch_xla, but '
                f'{env.world_size} processes were started: one drives all chips of a host, and '
                f'several hosts are not supported. Start one: leave --nproc out. For several '
                f'hosts leave spmd and sharding out.'
            )
        return [accelerator.device()]

    def check(self, runner: AnyRunner) -> Placement:
        """Make batches as large as those of all chips together."""
        self._chips = Chips()
        weights = 'divided among them' if self.divides_weights else 'whole on each'
        print_log(
            f'SPMD: one process trains on {self._chips.count} chips, and weights are {weights}. '
            f'What the config means for {self._chips.count} ranks it means for the chips; batch '
            f'norm sees the samples of all.',
            'current',
        )
        enlarge_batches(runner, self._chips.count)
        return self

    def place(
        self, model: nn.Module, runner: AnyRunner, wrapper: Optional[Mapping[str, object]] = None
    ) -> nn.Module:
        """Put the model on the device, unwrapped; see :meth:`Placement.place`."""
        if wrapper is not None:
            print_log('model_wrapper_cfg has no effect: one process has all chips.', 'current')
        context = replace(runner.device_context, backend=None)
        losses = runner.accelerator_options.host_losses
        sync_bn = runner.cfg.get('sync_bn')
        model = place_model(model, context, sync_bn=sync_bn, host_losses=losses)
        preprocessor = getattr(model, 'data_preprocessor', None)
        if not isinstance(preprocessor, nn.Module):
            raise ModelError(
                f'{type(model).__name__} has no data_preprocessor, whose batches are divided '
                f'among the chips. Inherit mmengine.model.BaseModel, or leave spmd out.'
            )
        preprocessor.register_forward_hook(SplitBatch(self._chips))
        if self.divides_weights:
            self._weights = SplitWeights(self._chips, model)
            preprocessor.register_forward_hook(self._weights.split)
        return model

    def initialize(self, model: nn.Module, runner: AnyRunner) -> None:
        """Initialize the weights, and divide them; see :meth:`Placement.initialize`."""
        super().initialize(model, runner)
        if self._weights is not None:
            self._weights.split()

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Divide the weights after they were loaded."""
        yield
        if self._weights is not None:
            self._weights.split()

    def watch(self, optim_wrapper: AnyOptimWrapper, model: nn.Module) -> None:
        """Divide the states of the optimizer as the weights are divided."""
        if self._weights is not None:
            self._weights.watch(optim_wrapper)


def _refuse_options(options: ShardingOptions) -> None:
    """Refuse options of PyTorch's FSDP2, which the compiler has no use for."""
    default = ShardingOptions.from_config(True)
    given = [name for name in options.names() if getattr(options, name) != getattr(default, name)]
    if given:
        raise ModelError(
            f'sharding has {", ".join(sorted(given))}, but on torch_xla the compiler divides '
            f'weights, and takes no options. Write sharding=True.'
        )
