"""Strategy auto against HF accelerate itself."""

import pytest
from accelerate.utils import get_balanced_memory, infer_auto_device_map

from mmdevplug.errors import PlacementError
from mmdevplug.model_parallel import plan
from mmdevplug.model_parallel.unsplittable import WholeModules
from tests.model_parallel.models import every_model, make

LIMITS = {0: 2**50, 1: 2**50, 2: 2**50}


@pytest.mark.parametrize('name', every_model())
def test_it_is_the_map_of_accelerate(name):
    model = make(name)
    classes = WholeModules(model).classes
    memory = get_balanced_memory(model, dict(LIMITS), classes)
    theirs = infer_auto_device_map(model, memory, classes)
    ours = plan(model, 'xla:0-2', 'auto', max_memory=LIMITS).device_map
    # Ours has, besides, what accelerate leaves without a device.
    assert {key: f'xla:{device}' for key, device in theirs.items()}.items() <= ours.items()


def test_without_accelerate(monkeypatch):
    monkeypatch.setitem(__import__('sys').modules, 'accelerate.utils', None)
    with pytest.raises(PlacementError, match='pip install accelerate'):
        plan(make('llama'), 'xla:0-1', 'auto')
    made = plan(make('llama'), 'xla:0-1', 'dynamic')
    assert 'auto failed' in made.steps[0]
    assert len(set(made.device_map.values())) == 2
