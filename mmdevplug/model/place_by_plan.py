"""Place the tensors of a model that has a device plan, and find those that are elsewhere."""

from typing import Any, Iterator, Tuple

import torch
from torch import Tensor, nn

from mmdevplug.errors import PlacementError


def plan_of(model: nn.Module) -> Any:
    """The plan that a model was dispatched by, None for a model on a single device."""
    return getattr(model, 'device_plan', None)


def misplaced_by_plan(model: nn.Module, plan: Any) -> Iterator[Tuple[str, Tensor, torch.device]]:
    """Yield the name, the tensor and the planned device of each tensor that is elsewhere."""
    for named in (model.named_parameters(), model.named_buffers()):
        for name, tensor in named:
            planned, found = plan.device_of(name), tensor.device
            if (found.type, found.index or 0) != (planned.type, planned.index or 0):
                yield name, tensor, planned


def place_by_plan(model: nn.Module, plan: Any) -> None:
    """Move each parameter and buffer that is not where the plan has it.

    Raises:
        PlacementError: If one stays behind.
    """
    from accelerate.utils import set_module_tensor_to_device

    for name, _, planned in list(misplaced_by_plan(model, plan)):
        set_module_tensor_to_device(model, name, planned)
    left = [f'{name} on {tensor.device}' for name, tensor, _ in misplaced_by_plan(model, plan)]
    if left:
        raise PlacementError(
            f'after dispatching {type(model).__name__}, these are not where the plan has them: '
            f'{", ".join(left[:8])}. Put them into a module that must not be split: '
            f"model_parallel=dict(no_split=['...'])."
        )
