"""Profiles with and without activities."""

import json
from types import SimpleNamespace

import pytest
import torch
from mmengine.logging import MMLogger

from mmdevplug.hooks import DeviceProfilerHook


@pytest.mark.parametrize('cpu', [True, False])
def test_without_activities_everything_is_recorded(tmp_path, cpu):
    """PyTorch 2.13 refuses an empty list; before, it stood for everything."""
    path = tmp_path / 'trace.json'
    hook = DeviceProfilerHook(activity_with_cpu=cpu, json_trace_path=str(path))
    runner = SimpleNamespace(
        max_epochs=1, logger=MMLogger.get_instance('profiler'), log_dir=str(tmp_path), rank=0
    )
    hook.before_run(runner)
    torch.ones(3).cumsum(0)
    hook.after_train_epoch(runner)
    events = json.loads(path.read_text(encoding='utf-8'))['traceEvents']
    assert 'aten::cumsum' in {event.get('name') for event in events}
