"""The config key ``model_wrapper_cfg``: which values options of ours may have."""

import pytest

from mmdevplug.config.model_wrapper import WrapperOptions
from mmdevplug.errors import ModelError

read = WrapperOptions.from_dict


def test_options_have_their_defaults():
    assert read({}) == WrapperOptions()


@pytest.mark.parametrize(
    ('option', 'values'),
    [
        ('bucket_cap_mb', [None, 25, 0.002, 0]),
        ('grad_compression', ['none', 'bf16']),
        ('nonfinite_grads', [None, 'stop', 'ignore']),
    ],
)
def test_possible_values(option, values):
    for value in values:
        assert getattr(read({option: value}), option) == value


@pytest.mark.parametrize(
    ('option', 'value', 'expected'),
    [
        ('bucket_cap_mb', -1, 'a number below 1,000,000, of at least 0, or None'),
        ('bucket_cap_mb', '25', 'a number below 1,000,000, of at least 0, or None'),
        ('bucket_cap_mb', float('inf'), 'a number below 1,000,000, of at least 0, or None'),
        ('grad_compression', 'fp16', "'none' or 'bf16'"),
        ('grad_compression', dict(type='powersgd'), "'none' or 'bf16'"),
        ('nonfinite_grads', 'skip', "'stop' or 'ignore', or None"),
    ],
)
def test_an_impossible_value_is_refused(option, value, expected):
    with pytest.raises(ModelError) as caught:
        read({option: value})
    assert str(caught.value) == f'model_wrapper_cfg.{option}={value!r}: expected {expected}.'


def test_a_misspelt_option_is_refused():
    with pytest.raises(ModelError, match="no option 'bucket_cap'; did you mean 'bucket_cap_mb'"):
        read(dict(bucket_cap=5))
