"""Run each prediction of a lazy device as one graph."""

from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Iterator, Sequence

import torch
from mmengine.model import BaseTTAModel
from torch import nn

from .base import Accelerator


def materialize_predictions(
    module: nn.Module, accelerator: Accelerator, devices: Sequence[torch.device]
) -> None:
    """Materialize after each forward pass without gradients.

    Metrics read predictions sample by sample; without this every sample would be its own graph.
    """

    def materialize(*_: object) -> None:
        if not torch.is_grad_enabled() and not _in_training_step.get():
            accelerator.materialize_all(devices)

    if not isinstance(module, BaseTTAModel):
        module.register_forward_hook(materialize)
        return
    # Test-time augmentation calls the inner model for each view and merges the predictions.
    module.module.register_forward_hook(materialize)
    merge = module.merge_preds

    def merge_as_one(*args: Any, **kwargs: Any) -> Any:
        merged = merge(*args, **kwargs)
        materialize()
        return merged

    module.merge_preds = merge_as_one


_in_training_step: ContextVar[bool] = ContextVar('in_training_step', default=False)


@contextmanager
def training_step() -> Iterator[None]:
    """Keep forward passes without gradients in the graph of the training step around them."""
    token = _in_training_step.set(True)
    try:
        yield
    finally:
        _in_training_step.reset(token)
