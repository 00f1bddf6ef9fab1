"""The config key ``model_wrapper_cfg``: which values options of ours may have."""

import pytest
from mmengine.config import ConfigDict

from mmdevplug.config.model_wrapper import GradCompression, WrapperOptions
from mmdevplug.errors import ModelError

read = WrapperOptions.from_dict


def test_options_have_their_defaults():
    assert read({}) == WrapperOptions()
    assert WrapperOptions().grad_compression == GradCompression('none', {})


@pytest.mark.parametrize(
    ('value', 'held'),
    [
        (None, GradCompression('none', {})),
        ('none', GradCompression('none', {})),
        (dict(type=None), GradCompression('none', {})),
        ('bf16', GradCompression('bf16', {})),
        (dict(type='fp16'), GradCompression('fp16', {})),
        (
            ConfigDict(type='powersgd', start_powerSGD_iter=2),
            GradCompression('powersgd', dict(start_powerSGD_iter=2)),
        ),
    ],
)
def test_a_compression_is_parsed_once(value, held):
    assert read(dict(grad_compression=value)).grad_compression == held


@pytest.mark.parametrize(
    'value', ['fp8', 3, {}, dict(type='bf16', rank=2), dict(type=None, rank=2), dict(rank=2)]
)
def test_what_is_no_compression_is_refused(value):
    with pytest.raises(ModelError, match="expected one of 'none', 'bf16', 'fp16', 'powersgd'"):
        read(dict(grad_compression=value))


@pytest.mark.parametrize(
    ('option', 'values'),
    [
        ('bucket_cap_mb', [None, 25, 0.002, 0]),
        ('hierarchy', ['auto', True, False]),
        ('nonfinite_grads', [None, 'stop', 'skip', 'ignore']),
    ],
)
def test_possible_values(option, values):
    for value in values:
        assert getattr(read({option: value}), option) == value


@pytest.mark.parametrize(
    ('option', 'value', 'expected'),
    [
        ('bucket_cap_mb', -1, 'a finite number of at least 0, or None'),
        ('bucket_cap_mb', '25', 'a finite number of at least 0, or None'),
        ('bucket_cap_mb', float('inf'), 'a finite number of at least 0, or None'),
        ('hierarchy', 'yes', "'auto', True or False"),
        ('hierarchy', None, "'auto', True or False"),
        ('nonfinite_grads', 'halt', "'stop', 'skip' or 'ignore', or None"),
    ],
)
def test_an_impossible_value_is_refused(option, value, expected):
    with pytest.raises(ModelError) as caught:
        read({option: value})
    assert str(caught.value) == f'model_wrapper_cfg.{option}={value!r}: expected {expected}.'


def test_a_misspelt_option_is_refused():
    with pytest.raises(ModelError, match="has no option 'hierachy'; did you mean 'hierarchy'\\?"):
        read(dict(hierachy=True))
