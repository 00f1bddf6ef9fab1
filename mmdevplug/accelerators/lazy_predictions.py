"""Run each prediction of a lazy device as one graph."""

from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Iterator, Sequence

import torch
from mmengine.model import BaseTTAModel
from torch import nn

from .base import Accelerator
from .host_predictions import finish_on_host


def materialize_predictions(
    module: nn.Module, accelerator: Accelerator, devices: Sequence[torch.device]
) -> None:
    """Materialize after each forward pass without gradients; see also :mod:`.host_predictions`.

    Metrics read predictions sample by sample; without this every sample would be its own graph.
    """

    def predicts(*_: object) -> bool:
        """Whether this is a prediction; if so, run what is recorded."""
        if is_prediction():
            accelerator.compilation.materialize_all(devices)
        return is_prediction()

    def materialize(*_: object) -> None:
        predicts()

    def settle(*_: object) -> None:
        """Run what made the weights before the first prediction, else its graph is another.

        Not after training, which ran it: each run may advance the device's random numbers.
        """
        before.remove()
        predicts()

    finish_on_host(module, predicts)
    # Test-time augmentation calls the inner model for each view and merges the predictions.
    called = module.module if isinstance(module, BaseTTAModel) else module
    first = getattr(called, 'data_preprocessor', None) or called
    before = first.register_forward_pre_hook(settle)
    called.register_forward_hook(materialize)
    if called is module:
        return
    merge = module.merge_preds

    def merge_as_one(*args: object, **kwargs: object) -> Any:
        merged = merge(*args, **kwargs)
        materialize()
        return merged

    module.merge_preds = merge_as_one


_in_training_step: ContextVar[bool] = ContextVar('in_training_step', default=False)


def is_prediction() -> bool:
    """Whether a forward pass is now neither one with gradients nor part of a training step."""
    return not torch.is_grad_enabled() and not _in_training_step.get()


@contextmanager
def training_step() -> Iterator[None]:
    """Keep forward passes without gradients in the graph of the training step around them."""
    token = _in_training_step.set(True)
    try:
        yield
    finally:
        _in_training_step.reset(token)
