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


def test_a_misspelt_option_is_refused():
    with pytest.raises(ModelError, match="no option 'bucket_cap'; did you mean 'bucket_cap_mb'"):
        read(dict(bucket_cap=5))
