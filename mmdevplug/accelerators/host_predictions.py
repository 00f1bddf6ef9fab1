"""Finish predictions on the host where each image has a size, or a number of boxes, of its own.

A network sees images of few sizes. What follows it resizes the prediction to the image, or chooses
boxes with masks, and metrics choose pixels with masks. On a lazy device each new size there is one
more graph, the network included.
"""

from inspect import signature
from typing import Any, Callable, Iterable

from torch import nn

from .move_nested import to_device


def finish_on_host(model: nn.Module, predicts: Callable[[], bool]) -> None:
    """Let segmentors and detectors of one stage make results of the network's output on the host.

    ``predicts`` tells whether this is no part of training, and then runs what the model's devices
    have recorded.
    """
    for part in model.modules():
        if callable(getattr(part, 'postprocess_result', None)):
            _replace(part, 'postprocess_result', predicts)
        elif hasattr(part, 'extract_feat'):
            heads = [head for child in part.children() for head in _listed(child)]
            final = [head for head in heads if hasattr(head, 'predict_by_feat')]
            # Boxes go back to a network on the device, see `host_rois` and `host_masks`.
            further = [head for head in heads if head not in final[:1] and _takes_boxes(head)]
            if all(getattr(head.forward, 'takes_host_boxes', False) for head in further):
                for head in final:
                    if head not in further:
                        _replace(head, 'predict_by_feat', predicts)


def _listed(child: nn.Module) -> Iterable[nn.Module]:
    return child if isinstance(child, nn.ModuleList) else [child]


def _takes_boxes(head: nn.Module) -> bool:
    """Whether a head predicts from the results of another, as RoI heads and mask heads do."""
    predict = getattr(type(head), 'predict', None)
    names = signature(predict).parameters if callable(predict) else ()
    return any('results_list' in name for name in names)


def _replace(part: nn.Module, method: str, predicts: Callable[[], bool]) -> None:
    if not isinstance(vars(part).get(method), FinishedOnHost):
        setattr(part, method, FinishedOnHost(part, method, predicts))


class FinishedOnHost:
    """Replace a method of a module: predictions call it with copies on the host."""

    def __init__(self, module: nn.Module, method: str, predicts: Callable[[], bool]) -> None:
        self.module, self.method, self._predicts = module, method, predicts
        self._before = vars(module).get(method)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        if self._predicts():
            args, kwargs = to_device((args, kwargs), 'cpu')
        elif self._before is not None:
            # Of a model over several devices; it would move back what was moved.
            return self._before(*args, **kwargs)
        return getattr(type(self.module), self.method)(self.module, *args, **kwargs)
