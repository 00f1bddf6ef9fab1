"""Results that metrics keep until the end of a validation, brought to the host.

MMEngine collects them from all ranks with pickle, and a tensor then wants to arrive on the device
that it left: a device of another rank, which the receiver may not have.
"""

from copy import copy
from typing import Any, Dict, List

from mmengine.structures import BaseDataElement
from torch import Tensor

from mmdevplug.device import Accelerator


class MetricResults:
    """Fetches what the metrics of an evaluator keep of each batch, in one batched copy.

    Args:
        evaluator (Evaluator): One whose ``metrics`` have a list ``results`` is served, any other
            is left alone.
    """

    def __init__(self, evaluator: Any) -> None:
        self._lists = [
            metric.results
            for metric in getattr(evaluator, 'metrics', ())
            if isinstance(getattr(metric, 'results', None), list)
        ]
        self._lengths = [len(results) for results in self._lists]

    def fetch_new(self, accelerator: Accelerator) -> None:
        """Replace the tensors in the results that were added since this object was made.

        Args:
            accelerator (Accelerator): Copies them to the host.
        """
        found: Dict[int, Tensor] = {}
        for results, length in zip(self._lists, self._lengths):
            for result in results[length:]:
                _find_device_tensors(result, found)
        if not found:
            return
        fetched = dict(zip(found, accelerator.to_host(list(found.values()))))
        for results, length in zip(self._lists, self._lengths):
            results[length:] = [_replaced(result, fetched) for result in results[length:]]


def _find_device_tensors(data: Any, found: Dict[int, Tensor]) -> None:
    if isinstance(data, Tensor):
        if data.device.type != 'cpu':
            found[id(data)] = data
        return
    if isinstance(data, (dict, BaseDataElement)):
        data = list(data.values())
    if isinstance(data, (list, tuple)):
        for item in data:
            _find_device_tensors(item, found)


def _replaced(data: Any, fetched: Dict[int, Tensor]) -> Any:
    if isinstance(data, Tensor):
        return fetched.get(id(data), data)
    if isinstance(data, BaseDataElement):
        new = data.new()
        new.set_data({key: _replaced(value, fetched) for key, value in data.items()})
        return new
    if isinstance(data, dict):
        new = copy(data)  # a defaultdict and its kin keep what they were made with
        new.update({key: _replaced(value, fetched) for key, value in data.items()})
        return new
    if isinstance(data, (list, tuple)):
        items: List[Any] = [_replaced(item, fetched) for item in data]
        return type(data)(*items) if hasattr(data, '_fields') else type(data)(items)
    return data
