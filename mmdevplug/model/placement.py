"""Where the weights of a model are: what a runner asks about it, from build to checkpoint."""

from contextlib import nullcontext
from typing import Callable, ContextManager, Mapping, Optional, Sequence

import torch
from mmengine.logging import MMLogger
from torch import nn

from mmdevplug.accelerators import Accelerator
from mmdevplug.environments.launch_variables import LaunchEnv
from mmdevplug.utils.annotations import AnyOptimWrapper, AnyRunner

from .place_model import initialize_weights, place_model


class Placement:
    """Puts a model whole on the device of each rank; a subclass puts it elsewhere.

    A runner has one from its beginning to its end. Nothing else asks which kind it is.

    Attributes:
        whole (bool): Whether each rank has all values of a tensor, so that a hook may move it and
            rank 0 can save a checkpoint alone.
        one_device (bool): Whether a rank has the model on one device.
        writes_shards (bool): Whether the tensors of a checkpoint are in a folder beside it.
    """

    whole = one_device = True
    writes_shards = False

    def choose_devices(self, accelerator: Accelerator, env: LaunchEnv) -> Sequence[torch.device]:
        """Choose the devices of this rank."""
        return [accelerator.device(env.local_rank)]

    def log(self, logger: MMLogger) -> None:
        """Log how the model is placed, unless it is whole on one device."""

    def check(self, runner: AnyRunner) -> 'Placement':
        """Refuse what cannot be placed before the model is built; return what places it."""
        return self

    def build(self, build: Callable[[], nn.Module]) -> nn.Module:
        """Build the model."""
        return build()

    def spread(self, model: nn.Module, runner: AnyRunner) -> nn.Module:
        """Put the bare model on the devices of this rank, where they are several."""
        return model

    def place(
        self, model: nn.Module, runner: AnyRunner, wrapper: Optional[Mapping[str, object]] = None
    ) -> nn.Module:
        """Put the model on its devices, and wrap it if the job is distributed."""
        return place_model(
            model,
            runner.device_context,
            wrapper,
            sync_bn=runner.cfg.get('sync_bn'),
            find_unused_parameters=runner.cfg.get('find_unused_parameters', False),
            spread=None if self.one_device else lambda bare: self.spread(bare, runner),
            host_losses=runner.accelerator_options.host_losses,
        )

    def initialize(self, model: nn.Module, runner: AnyRunner) -> None:
        """Initialize the weights of the bare model, equal on all ranks."""
        place = runner.accelerator_options.initial_weights
        initialize_weights(model, runner.device_context, place)

    def watch(self, optim_wrapper: AnyOptimWrapper, model: nn.Module) -> None:
        """Look after the optimizer, which was built for the placed model."""

    def check_hooks(self, runner: AnyRunner) -> None:
        """Refuse hooks that need what the placement does not give."""

    def loading(self) -> ContextManager[object]:
        """The context in which whole weights are loaded into the placed model."""
        return nullcontext()

    def collect(self, state: object, folder: Optional[str], part: str) -> object:
        """Make a state whole on rank 0, or write its tensors to a folder; all ranks call it."""
        return state


#: What a stock runner has.
WHOLE = Placement()


def placement_of(runner: AnyRunner) -> Placement:
    """Where the model of a runner is, also of a stock one."""
    return getattr(runner, 'placement', WHOLE)
