"""Strategy auto against HF accelerate itself."""

import pytest
from accelerate.utils import get_balanced_memory, infer_auto_device_map

from mmdevplug.errors import PlacementError
from mmdevplug.model_parallel import plan
from mmdevplug.model_parallel.accelerate_map import balanced_memory
from mmdevplug.model_parallel.unsplittable import WholeModules
from tests.model_parallel.models import MODELS, make

LIMITS = [{0: 2**50, 1: 2**50, 2: 2**50}, {0: 2**30, 1: 2**14, 2: 2**30}, {0: 2**40}]


@pytest.mark.parametrize('name', list(MODELS))
def test_the_same_limits_and_map(name):
    model = make(name)
    classes = WholeModules(model).classes
    for limits in LIMITS:
        expected = get_balanced_memory(model, dict(limits), classes)
        assert balanced_memory(model, limits, classes) == expected
    memory = get_balanced_memory(model, dict(LIMITS[0]), classes)
    theirs = infer_auto_device_map(model, memory, classes)
    options = dict(max_memory=LIMITS[0], force_balance=False)
    ours = plan(model, 'xla:0-2', 'auto', **options).device_map
    # Ours has, besides, what accelerate leaves without a device.
    assert {key: f'xla:{device}' for key, device in theirs.items()}.items() <= ours.items()


def test_without_accelerate(monkeypatch):
    monkeypatch.setitem(__import__('sys').modules, 'accelerate.utils', None)
    with pytest.raises(PlacementError, match='pip install accelerate'):
        plan(make('llama'), 'xla:0-1', 'auto')
    made = plan(make('llama'), 'xla:0-1', 'dynamic')
    assert 'auto failed' in made.steps[0]
    assert len(set(made.device_map.values())) == 2
