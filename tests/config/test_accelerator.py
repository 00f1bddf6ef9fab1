"""The config key ``accelerator``: how it is parsed, and what is refused."""

import dataclasses

import pytest
from mmengine.config import Config

from mmdevplug.accelerators import CPUAccelerator, choose_accelerator
from mmdevplug.config.accelerator import AcceleratorOptions
from mmdevplug.config.fields import options_of
from mmdevplug.config.pad_to import PadTo
from mmdevplug.errors import AcceleratorError

read = AcceleratorOptions.from_config


@pytest.mark.parametrize(
    ('config', 'device'),
    [
        (None, {}),
        ({}, {}),
        ('cpu', dict(type='cpu')),
        (dict(type='gcu', generation='t20', backend='gloo'), dict(type='gcu', generation='t20')),
        (Config(dict(accelerator=dict(type='cpu', memory=False))).accelerator, dict(type='cpu')),
        # No accelerator, but an argument of one.
        (dict(type='zeta', device_type='card'), dict(type='zeta', device_type='card')),
    ],
)
def test_what_is_not_ours_goes_to_the_accelerator(config, device):
    assert read(config).device == device


def test_an_accelerator_may_be_an_object():
    accelerator = CPUAccelerator()
    options = read(accelerator)
    assert options == AcceleratorOptions(device=accelerator)
    assert choose_accelerator(options.device).accelerator is accelerator


def test_options_have_their_defaults():
    assert read('cpu') == AcceleratorOptions(device=dict(type='cpu'))
    for one in options_of(AcceleratorOptions):
        written = read({one.name: one.metadata['default']})
        assert getattr(written, one.name) == getattr(read(None), one.name) == one.default


def test_defaults_of_a_caller_give_way_to_the_config():
    assert read(None, backend='auto').backend == 'auto'
    assert read(CPUAccelerator(), backend='auto').backend == 'auto'
    assert read(dict(backend=None), backend='auto').backend is None


@pytest.mark.parametrize(
    ('option', 'value', 'held'),
    [
        ('memory', None, False),
        ('memory', True, True),
        ('compilations', 0, False),
        ('pad_to', 64, PadTo(multiple=64)),
        ('pad_to', False, None),
        ('preemption', 1, True),
    ],
)
def test_values_are_parsed_once(option, value, held):
    assert getattr(read({option: value}), option) == held


def test_options_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        read(None).pad_to = None


def test_every_wrong_option_can_be_told_at_once():
    problems = []
    wrong = dict(preemption='no', pad_to='large', memory=False, backend='gloo')
    options = read(wrong, problems=problems)
    assert [str(problem).split('=')[0] for problem in problems] == [
        'accelerator.pad_to',
        'accelerator.preemption',
    ]
    assert options == AcceleratorOptions(memory=False, backend='gloo')


@pytest.mark.parametrize('config', [dict(padto=64), dict(type='auto', padto=64)])
def test_a_misspelt_option_is_refused_where_no_accelerator_is_named(config, monkeypatch):
    monkeypatch.delenv('MMDEVPLUG_ACCELERATOR', raising=False)
    with pytest.raises(
        AcceleratorError,
        match="accelerator has padto: no option of training.*did you mean 'pad_to'\\?",
    ):
        choose_accelerator(read(config).device)


def test_a_misspelt_option_is_refused_by_the_accelerator_that_is_named():
    with pytest.raises(
        AcceleratorError, match="has an option it does not take.*padto.*did you mean 'pad_to'\\?"
    ):
        choose_accelerator(read(dict(type='cpu', padto=64)).device)
