"""Divide weights among the chips, with their gradients and the states of optimizers."""

from torch import Tensor, nn
from torch.optim import Optimizer

from mmdevplug.accelerators.xla import is_divided
from mmdevplug.utils.annotations import AnyOptimWrapper
from mmdevplug.utils.model import list_optim_wrappers

from .partition import Chips, dim_to_split, is_on_chips


class SplitWeights:
    """Divides what a model trains along the first dimension that the chips divide.

    A weight without such a dimension is whole on each chip. The compiler keeps what it computes
    from divided tensors divided, so each is annotated once, and again after values were loaded
    into it: best before it is materialized, since afterwards that is an execution of its own.
    """

    def __init__(self, chips: Chips, model: nn.Module) -> None:
        self.chips, self.model = chips, model

    def split(self, *_: object) -> None:
        """Divide the weights that are whole; also a forward hook of the data preprocessor."""
        for parameter in self.model.parameters():
            self._split(parameter)

    def watch(self, optim_wrapper: AnyOptimWrapper) -> None:
        """Divide the states of optimizers after each step, when they are new."""
        for each in list_optim_wrappers(optim_wrapper):
            each.optimizer.register_step_post_hook(self._split_states)

    def _split_states(self, optimizer: Optimizer, *_: object) -> None:
        for parameter, state in optimizer.state.items():
            for value in state.values():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    self._split(value)

    def _split(self, tensor: Tensor) -> None:
        dim = dim_to_split(tensor, self.chips.count) if is_on_chips(tensor) else None
        if dim is not None and not is_divided(tensor):
            self.chips.split(tensor, dim)
