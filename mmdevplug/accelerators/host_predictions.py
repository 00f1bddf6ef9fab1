"""Finish predictions on the host where each image has a size, or a number of boxes, of its own.

A network sees images of few sizes. What follows it resizes the prediction to the image, or chooses
boxes with masks, and metrics choose pixels with masks. On a lazy device each new size there is one
more graph, the network included.
"""

from typing import Any, Callable

import torch
from torch import nn

from .move_nested import to_device


def finish_on_host(model: nn.Module, materialize: Callable[[], None]) -> None:
    """Let segmentors and detectors of one stage make results of the network's output on the host.

    ``materialize`` runs what is recorded on the model's devices.
    """
    for part in model.modules():
        if callable(getattr(part, 'postprocess_result', None)):
            _replace(part, 'postprocess_result', materialize)
        head = getattr(part, 'bbox_head', None)
        # With a second stage, boxes go back to the network.
        one_stage = hasattr(part, 'extract_feat') and getattr(part, 'roi_head', None) is None
        if one_stage and callable(getattr(head, 'predict_by_feat', None)):
            _replace(head, 'predict_by_feat', materialize)


def _replace(part: nn.Module, method: str, materialize: Callable[[], None]) -> None:
    if not isinstance(vars(part).get(method), FinishedOnHost):
        setattr(part, method, FinishedOnHost(part, method, materialize))


class FinishedOnHost:
    """Replace a method of a module: without gradients, call it with copies on the host."""

    def __init__(self, module: nn.Module, method: str, materialize: Callable[[], None]) -> None:
        self.module, self.method = module, method
        self._materialize = materialize
        self._before = vars(module).get(method)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            # In one graph with what else was recorded.
            self._materialize()
            args, kwargs = to_device((args, kwargs), 'cpu')
        elif self._before is not None:
            # Of a model over several devices; it would move back what was moved.
            return self._before(*args, **kwargs)
        return getattr(type(self.module), self.method)(self.module, *args, **kwargs)
