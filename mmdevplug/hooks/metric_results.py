"""Results that metrics keep until the end of a validation, brought to the host.

MMEngine collects them from all ranks with pickle, and a tensor then wants to arrive on the device
that it left: a device of another rank, which the receiver may not have.
"""

from typing import Any

from mmdevplug.dist import to_device


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

    def fetch_new(self) -> None:
        """Replace the tensors in the results that were added since this object was made."""
        new = [results[length:] for results, length in zip(self._lists, self._lengths)]
        for results, length, fetched in zip(self._lists, self._lengths, to_device(new, 'cpu')):
            results[length:] = fetched
