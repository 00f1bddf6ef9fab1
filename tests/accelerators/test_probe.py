"""The first operation on a device: what passes, and what a refusal says."""

from functools import cached_property

import pytest
import torch

from mmdevplug.accelerators import Copies, CPUAccelerator, probe_device
from mmdevplug.errors import AcceleratorError

HOST = torch.device('cpu')


class ManyDevices(CPUAccelerator):
    """A family of three devices behind a variable, on the host's memory."""

    name = 'fake'
    visible_devices_env = 'FAKE_VISIBLE_DEVICES'

    def device_count(self):
        return 3


def changing(change):
    """Devices whose results come back changed."""
    accelerator = ManyDevices()
    accelerator.copies.to_host = lambda tensors: [change(tensor.detach()) for tensor in tensors]
    return accelerator


def refusal(accelerator, device=HOST):
    with pytest.raises(AcceleratorError) as caught:
        probe_device(accelerator, device)
    return str(caught.value), caught.value


@pytest.fixture(autouse=True)
def visible(monkeypatch):
    monkeypatch.setenv('FAKE_VISIBLE_DEVICES', '4,5,6')


@pytest.mark.parametrize('accelerator', [CPUAccelerator(), ManyDevices()])
def test_device_that_computes_right_passes(accelerator):
    probe_device(accelerator, HOST)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_device_that_multiplies_in_low_precision_passes(dtype):
    probe_device(changing(lambda tensor: tensor.to(dtype).to(torch.float32)), HOST)


@pytest.mark.parametrize(
    ('change', 'difference'),
    [
        (lambda tensor: tensor + 1, '0.136'),
        (torch.zeros_like, r'\d'),
        (lambda tensor: tensor.flip(0), r'\d'),
        (lambda tensor: torch.full_like(tensor, float('nan')), 'inf'),
        (lambda tensor: torch.full_like(tensor, float('inf')), 'inf'),
    ],
    ids=['offset', 'zeros', 'rows-swapped', 'nan', 'inf'],
)
def test_device_that_computes_wrongly_is_refused(change, difference):
    message, _ = refusal(changing(change))
    assert message.startswith('device cpu computes a matrix product that differs')
    assert "FAKE_VISIBLE_DEVICES='4,5,6'" in message
    with pytest.raises(AcceleratorError, match=f'by {difference}'):
        probe_device(changing(change), HOST)


def test_one_wrong_element_is_enough():
    def spoil(tensor):
        tensor = tensor.clone()
        tensor[3, 5] = float('nan')
        return tensor

    assert 'differs from the CPU by inf' in refusal(changing(spoil))[0]


@pytest.mark.parametrize('function', ['set_device', 'to_host'])
@pytest.mark.parametrize(
    'error', [RuntimeError('no card'), OSError('driver gone'), ValueError('bad index')]
)
def test_device_that_raises_is_refused_with_the_original_error(function, error):
    def fail(*args):
        raise error

    accelerator = ManyDevices()
    setattr(accelerator.copies if function == 'to_host' else accelerator, function, fail)
    message, raised = refusal(accelerator)
    assert message.startswith('the first operation of device cpu fails with ')
    assert f'{type(error).__name__}: {error}' in message
    assert "FAKE_VISIBLE_DEVICES='4,5,6'" in message
    assert raised.__cause__ is error


def test_device_that_pytorch_does_not_have_is_refused_with_its_name():
    # No card here; an index beyond any machine's where there are some.
    message, _ = refusal(ManyDevices(), torch.device('cuda', 127))
    assert message.startswith('the first operation of device cuda:127 fails with')


@pytest.mark.parametrize('dtype', [torch.float64, torch.float16])
def test_default_dtype_of_the_script_does_no_harm(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        probe_device(CPUAccelerator(), HOST)
    finally:
        torch.set_default_dtype(before)


def test_unset_variable_is_named_as_such(monkeypatch):
    monkeypatch.delenv('FAKE_VISIBLE_DEVICES')
    assert 'FAKE_VISIBLE_DEVICES is not set' in refusal(changing(torch.zeros_like))[0]


def test_gradient_mode_does_no_harm():
    with torch.no_grad():
        probe_device(CPUAccelerator(), HOST)
    with torch.inference_mode():
        probe_device(CPUAccelerator(), HOST)


@pytest.mark.parametrize('error', [RuntimeError('no kernel'), ValueError('no float64')])
def test_device_that_cannot_return_a_dtype_does_not_keep_it(error):
    class NoCopies(Copies):
        def to_host(self, tensors):
            if any(tensor.dtype == torch.float64 for tensor in tensors):
                raise error
            return super().to_host(tensors)

    class NoFloat64(ManyDevices):
        copies = cached_property(NoCopies)

    assert probe_device(NoFloat64(), HOST) == ['float64']


def test_dtypes_that_come_back_as_others_are_not_kept():
    narrows = changing(
        lambda tensor: tensor.float() if tensor.is_floating_point() else tensor.int()
    )
    assert probe_device(narrows, HOST) == ['int64', 'float64']
