"""Run each prediction of a lazy device as one graph, and finish it on the host.

A network sees images of few sizes. What follows it resizes the prediction to the image, or chooses
boxes with masks, and metrics choose pixels with masks. Each new size is one more graph, with the
network in it, if a lazy device does that.
"""

from contextlib import contextmanager
from contextvars import ContextVar
from inspect import signature
from typing import Any, Callable, Iterable, Iterator, Sequence

import torch
from mmengine.model import BaseTTAModel
from torch import nn

from mmdevplug.accelerators import Accelerator, to_device


def materialize_predictions(
    module: nn.Module, accelerator: Accelerator, devices: Sequence[torch.device]
) -> None:
    """Materialize after each forward pass without gradients; see also :func:`finish_on_host`.

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
        """Run the operations that made the weights before the first prediction.

        Otherwise the graph of the first prediction contains them, and the second prediction
        compiles another graph. If training comes first, its first step removes this hook: an
        execution more may advance the device's random numbers.
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
    merge: Any = module.merge_preds

    def merge_as_one(*args: object, **kwargs: object) -> object:
        merged = merge(*args, **kwargs)
        materialize()
        return merged

    vars(module)['merge_preds'] = merge_as_one


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
            # Boxes go back to a network on the device, see `rois` and `masks`.
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

    def __call__(self, *args: object, **kwargs: object) -> object:
        if self._predicts():
            args, kwargs = to_device((args, kwargs), 'cpu')
        elif self._before is not None:
            # Of a model over several devices; it would move back what was moved.
            return self._before(*args, **kwargs)
        return getattr(type(self.module), self.method)(self.module, *args, **kwargs)
