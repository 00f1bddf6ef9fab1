"""A hook that writes what each iteration of a run did, for record_training.py."""

import json
import os
from pathlib import Path
from typing import Any, Dict, List

from mmengine.hooks import Hook

#: Names the file that rank 0 writes.
RECORD_FILE = 'MMDEVPLUG_RUN_RECORD'


class RunRecordHook(Hook):
    """Write loss, graph executions and compilations of each training iteration as JSON.

    On other devices than torch_xla's there is the loss alone.
    """

    priority = 'LOWEST'

    def before_train(self, runner: Any) -> None:
        """Begin an empty list."""
        self._on_xla = next(runner.model.parameters()).device.type == 'xla'
        self._rows: List[Dict[str, float]] = []

    def before_train_iter(self, runner: Any, *args: Any, **kwargs: Any) -> None:
        """Read the counters, after what validation has executed."""
        self._before = self._counters()

    def after_train_iter(self, runner: Any, *args: Any, **kwargs: Any) -> None:
        """Note what this iteration added to the counters, then the loss of the log."""
        row = {name: count - self._before[name] for name, count in self._counters().items()}
        row['loss'] = float(runner.message_hub.get_scalar('train/loss').current())
        self._rows.append(row)

    def after_train(self, runner: Any) -> None:
        """Write the file."""
        if runner.rank == 0:
            Path(os.environ[RECORD_FILE]).write_text(json.dumps(self._rows), encoding='utf-8')

    def _counters(self) -> Dict[str, int]:
        if not self._on_xla:
            return {}
        import torch_xla.core.xla_model as xm
        from torch_xla.debug import metrics

        xm.wait_device_ops()  # executions are counted when they end
        names = dict(executions='ExecuteTime', compilations='CompileTime')
        return {ours: (metrics.metric_data(name) or [0])[0] for ours, name in names.items()}
