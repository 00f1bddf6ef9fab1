"""The config key ``model_parallel``."""

import pytest
from mmengine.config import ConfigDict

from mmdevplug.config.model_parallel import ModelParallelOptions
from mmdevplug.errors import PlacementError


def test_no_key_is_one_device():
    assert ModelParallelOptions.from_config(None).enable is False
    assert ModelParallelOptions.from_config(True).enable is True
    assert ModelParallelOptions.from_config({}).enable is None


def test_other_names():
    found = ModelParallelOptions.from_config(
        ConfigDict(
            enable=True,
            device_map_strategy='dynamic',
            use_dynamic_device_map=True,
            use_balanced_device_map=False,
            force_balance=True,
            exclude_cpu=True,
            balance_threshold=0.2,
            precision='bf16',
            check_r_consistency=True,
            strict_r_check=False,
        )
    )
    assert (found.strategy, found.balance_threshold) == ('dynamic', 0.2)
    assert (found.precision, found.check_r_consistency) == ('bf16', True)
    assert (
        ModelParallelOptions.from_config(dict(use_balanced_device_map=True)).strategy == 'balanced'
    )
    assert ModelParallelOptions.from_config(dict(use_model_parallel=False)).enable is False


@pytest.mark.parametrize('name', ['float32', 'bfloat16', 'float16', 'fp32', 'bf16', 'fp16', None])
def test_precisions(name):
    assert ModelParallelOptions.from_config(dict(precision=name)).precision == name


@pytest.mark.parametrize(('value', 'held'), [(True, True), (1, True), (0, False), (None, None)])
def test_flags(value, held):
    options = dict(force_balance=value, exclude_cpu=value)
    found = ModelParallelOptions.from_config(options)
    assert (found.force_balance, found.exclude_cpu) == (held, bool(held))


@pytest.mark.parametrize(
    ('options', 'told'),
    [
        (dict(enabled=True), "has no option 'enabled'; did you mean 'enable'?"),
        (dict(device_map_strateg='auto'), "did you mean 'device_map_strategy'?"),
        (dict(use_dynamic_device_mapp=True), "did you mean 'use_dynamic_device_map'?"),
        (dict(precision='int8'), "'float16', or None."),
        (dict(use_balanced_device_map=True, use_dynamic_device_map=True), 'contradict'),
        (dict(device_map_strategy='auto', use_dynamic_device_map=True), 'contradict'),
        (dict(device_map_strategy='auto', strategy='balanced'), 'contradict'),
        (dict(enable=True, use_model_parallel=False), 'contradict'),
    ],
)
def test_bad_options_are_named(options, told):
    with pytest.raises(PlacementError) as raised:
        ModelParallelOptions.from_config(options)
    assert told in str(raised.value)
    assert 'model_parallel' in str(raised.value)
