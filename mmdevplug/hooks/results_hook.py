"""Copy the results that metrics keep to the host."""

from typing import List, Tuple

from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from mmdevplug.accelerators import to_device
from mmdevplug.utils.annotations import AnyLoop, AnyRunner
from mmdevplug.utils.loops import metrics_of


@HOOKS.register_module()
class ResultsHook(Hook):
    """Copy what metrics keep to the host, batch by batch; registered where it is not there."""

    priority = 'HIGHEST'

    def __init__(self) -> None:
        self._results: List[Tuple[list, int]] = []

    def before_val_iter(self, runner: AnyRunner, *args: object, **kwargs: object) -> None:
        """Note how many results the metrics have."""
        self._note_results(runner.val_loop)

    def before_test_iter(self, runner: AnyRunner, *args: object, **kwargs: object) -> None:
        """Note how many results the metrics have."""
        self._note_results(runner.test_loop)

    def _note_results(self, loop: AnyLoop) -> None:
        found = [getattr(metric, 'results', None) for metric in metrics_of(loop)]
        self._results = [(each, len(each)) for each in found if isinstance(each, list)]

    def after_val_iter(self, runner: AnyRunner, *args: object, **kwargs: object) -> None:
        """Copy what metrics keep of this batch to the host, in one call.

        MMEngine collects results from all ranks with pickle, which restores a tensor on the device
        that it was on: a device of another rank, which the receiver may not have.
        """
        if self._results:
            new = to_device([results[length:] for results, length in self._results], 'cpu')
            for (results, length), fetched in zip(self._results, new):
                results[length:] = fetched

    after_test_iter = after_val_iter
