"""Every option takes what its page says, and refuses any other value in one sentence."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from mmdevplug.config.accelerator import AcceleratorOptions, to_dict
from mmdevplug.config.checkpoint import CheckpointOptions
from mmdevplug.config.fields import options_of
from mmdevplug.config.launch_options import LaunchOptions
from mmdevplug.config.model_parallel import ModelParallelOptions
from mmdevplug.config.model_wrapper import WrapperOptions
from mmdevplug.config.sharding import ShardingOptions
from mmdevplug.errors import AcceleratorError, CheckpointError
from mmdevplug.patches.torch_load import trust_classes

KINDS = (
    *(AcceleratorOptions, CheckpointOptions, LaunchOptions, ModelParallelOptions),
    *(ShardingOptions, WrapperOptions),
)
OPTIONS = [(kind, one.name) for kind in KINDS for one in options_of(kind)]
SINGLE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**20), 10**20),
    st.floats(),
    st.text(max_size=8),
    st.binary(max_size=4),
    st.sampled_from(['auto', 'cpu', 'host', 'bf16', 1.5, 2, 64, (512, 512), object(), int]),
    st.builds(np.array, st.lists(st.integers(0, 9), max_size=3)),
)
VALUES = st.recursive(
    SINGLE,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.one_of(st.text(max_size=3), st.integers()), inner, max_size=2),
    ),
    max_leaves=4,
)


def refusal(kind, name, value):
    try:
        kind(**kind.read({name: value}))
    except kind.error as error:
        return str(error)
    return None


@pytest.mark.parametrize(('kind', 'name'), OPTIONS)
@given(value=VALUES)
def test_any_value_is_taken_or_refused_in_a_sentence(kind, name, value):
    said = refusal(kind, name, value)
    if said is not None:
        assert f'{kind.key}.{name}' in said
        assert 'expected' in said
        assert '\n' not in said


@pytest.mark.parametrize(
    ('kind', 'name', 'value'),
    [
        (ModelParallelOptions, 'devices', 1.5),
        (ModelParallelOptions, 'devices', [1.5]),
        (ModelParallelOptions, 'no_split', 5),
        (ModelParallelOptions, 'max_memory', ['1GB']),
        (ModelParallelOptions, 'balance_threshold', float('nan')),
        (AcceleratorOptions, 'pad_to', 10**12),
        (AcceleratorOptions, 'backend', 5),
        (AcceleratorOptions, 'compilations', dict(warmup=3)),
        (AcceleratorOptions, 'preemption', dict(signals=['SIGTERM'])),
        (WrapperOptions, 'bucket_cap_mb', 1e308),
        (WrapperOptions, 'bucket_cap_mb', '25'),
        (WrapperOptions, 'bucket_cap_mb', float('inf')),
        (WrapperOptions, 'grad_compression', dict(type='powersgd')),
        (LaunchOptions, 'master_addr', 5),
    ],
)
def test_other_types_and_ranges_are_refused(kind, name, value):
    assert refusal(kind, name, value).startswith(f'{kind.key}.{name}={value!r}: expected ')


@pytest.mark.parametrize(
    'config', [7, ['cpu'], True, *(dict(type=each) for each in (['cpu'], 5, {}, b'cpu', ('cpu',)))]
)
def test_an_accelerator_that_is_no_name(config):
    with pytest.raises(AcceleratorError, match='accelerator=.*expected a name such as'):
        to_dict(config)


@pytest.mark.parametrize('value', [5, 'a.B', dict(a=1), 1.5])
def test_classes_that_are_no_list(value):
    with pytest.raises(CheckpointError, match='expected a list of dotted names'):
        trust_classes(value)
