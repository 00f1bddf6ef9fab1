"""Detection, copies, random numbers, checkpoints and operations that mix devices."""

import pytest
import torch
from torch import nn

from mmdevplug.accelerators.probe import probe_device
from mmdevplug.accelerators.random_states import random_state, set_random_state
from mmdevplug.checkpoint.host_copy import copy_to_host
from mmdevplug.checkpoint.writing import write_checkpoint
from mmdevplug.device_guard import DeviceGuard
from mmdevplug.errors import DeviceMismatchError
from mmdevplug.staged.host_buffers import HostBuffers, pins_memory
from tests.conformance.card import TOLERANCE, assert_equal
from tests.difference import difference

#: Every model needs these on its device; of others the report says which there are.
NEEDED_DTYPES = (torch.float32, torch.int64, torch.int32, torch.uint8, torch.bool)
OTHER_DTYPES = (torch.float16, torch.bfloat16, torch.float64, torch.int16, torch.int8)

#: Layouts of a host tensor of shape (4, 6, 5, 3).
LAYOUTS = {
    'contiguous': lambda host: host,
    'transposed': lambda host: host.transpose(0, 3),
    'every second element': lambda host: host[::2, 1::2],
    'expanded': lambda host: host[:1].expand(4, 6, 5, 3),
    'channels last': lambda host: host.contiguous(memory_format=torch.channels_last),
    'of zero size': lambda host: host[:0],
    'of one value': lambda host: host[0, 0, 0, 0],
}


def _numbers(dtype=torch.float32):
    return (
        (torch.arange(4 * 6 * 5 * 3, device='cpu') % 2**7 - 60).abs().reshape(4, 6, 5, 3).to(dtype)
    )


def detect(card):
    count = card.accelerator.device_count()
    for rank in range(count):
        probe_device(card.accelerator, card.accelerator.device(rank))
    return count


def test_detection(asked):
    """There are devices, and each multiplies matrices as the CPU does."""
    (count,) = asked.run(detect)
    assert count > 0


def copy_everything(card):
    missing = []
    for dtype in (*NEEDED_DTYPES, *OTHER_DTYPES):
        try:
            _copy_layouts(card, dtype)
        except (RuntimeError, TypeError, NotImplementedError):
            if dtype in NEEDED_DTYPES:
                raise
            missing.append(str(dtype))
    accelerator = card.accelerator
    if accelerator.device_count() > 1 and not accelerator.shares_devices:
        there = _numbers().to(accelerator.device(0)).to(accelerator.device(1))
        assert_equal(accelerator.copies.to_host([there])[0], _numbers(), 'from device to device')
    if pins_memory(card.device.type):
        on_device = _numbers().pin_memory().to(card.device, non_blocking=True)
        buffers = HostBuffers()
        found = buffers.read(on_device, later=True)
        buffers.wait_for_copies()
        assert_equal(found.view(on_device.shape), _numbers(), 'from and to pinned memory')
    return missing


def test_copies(asked):
    """Tensors are the same bits after the way to the device, on it, and back."""
    (missing,) = asked.run(copy_everything)
    assert len(missing) < len(OTHER_DTYPES), missing


def _copy_layouts(card, dtype):
    copies = card.accelerator.copies
    for name, lay_out in LAYOUTS.items():
        what = f'{dtype}, {name}'
        host = lay_out(_numbers(dtype))
        on_device = host.to(card.device)
        there = lay_out(_numbers(dtype).to(card.device))
        found, again = copies.to_host([on_device, there])
        assert_equal(found, host, f'{what}, sent and fetched')
        assert_equal(again, host, f'{what}, laid out on the device')
        # As gradients travel: into tensors that are there.
        (sent,) = copies.to_device([host], card.device)
        target, fetched = torch.zeros_like(sent), torch.zeros(host.shape, dtype=dtype)
        copies.into_device([host], [target])
        card.accelerator.compilation.materialize(card.device, [target])
        copies.into_host([target], [fetched])
        assert_equal(fetched, host, f'{what}, into existing tensors')


def draw_numbers(card):
    accelerator, device = card.accelerator, card.device

    def draw():
        return card.fetch([torch.rand(1000, device=device)])[0]

    def seeded(seed):
        torch.manual_seed(seed)
        accelerator.manual_seed(seed)
        return draw()

    first, following = seeded(1), draw()
    assert 0.4 < first.mean().item() < 0.6
    assert first.min() >= 0
    assert first.max() < 1
    assert not torch.equal(first, following)
    assert torch.equal(first, seeded(1))
    assert not torch.equal(first, seeded(2))
    accelerator.renew_rng()
    state = random_state(accelerator, [device])
    expected = draw()
    lost = set_random_state(state, accelerator, [device])
    if lost is not None:
        pytest.skip(f'seeds work, but a resumed run draws other numbers: {lost}')
    assert torch.equal(draw(), expected)


def test_random_numbers(asked):
    """The same seed, and the same saved state, draw the same numbers."""
    asked.run(draw_numbers)


def make_model():
    return nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 4))


def save_and_load(card, folder):
    device = card.device
    torch.manual_seed(0)
    model = make_model().to(device)
    optimizer = torch.optim.Adam(model.parameters())
    inputs = torch.sin(torch.arange(40.0)).reshape(5, 8)
    model(inputs.to(device)).pow(2).sum().backward()
    optimizer.step()
    state = dict(model=model.state_dict(), optimizer=optimizer.state_dict())
    on_host = copy_to_host(state, card.accelerator)
    path = str(folder / 'written.pth')
    write_checkpoint(on_host, path)
    loaded = torch.load(path, map_location='cpu')
    saved = [loaded['model']]
    if not card.accelerator.compilation.lazy:  # on which torch.load puts them in any case
        torch.save(state['model'], path)
        saved.append(torch.load(path, map_location='cpu'))
    for found in saved:
        for name, value in on_host['model'].items():
            assert_equal(found[name], value, name)
    other = make_model()
    other.load_state_dict(loaded['model'])
    expected = other.eval()(inputs)
    moved = other.to(device)
    resumed = torch.optim.Adam(moved.parameters())
    resumed.load_state_dict(loaded['optimizer'])
    assert {each['exp_avg'].device for each in resumed.state.values()} == {device}
    (outputs,) = card.fetch([moved(inputs.to(device))])
    return difference(outputs, expected.detach())


def test_checkpoint(asked, tmp_path):
    """Weights and optimizer, saved, are loaded on the CPU and on the device."""
    (apart,) = asked.run(save_and_load, tmp_path)
    assert apart <= 10 * TOLERANCE


def mix_devices(card):
    device = card.device
    if device.type == 'cpu':
        pytest.skip('the CPU is one device, with which nothing can be mixed')
    if not hasattr(torch.overrides, 'TorchFunctionMode'):
        pytest.skip('DeviceGuard needs PyTorch 1.13')
    host = torch.arange(6.0).reshape(2, 3)
    on_device = (host + 1).to(device)
    with pytest.raises(DeviceMismatchError) as told, DeviceGuard('error'):
        host * on_device
    assert str(device) in str(told.value)
    assert 'cpu' in str(told.value)
    with DeviceGuard('move') as guard:
        moved = host * on_device
    (found,) = card.fetch([moved])
    return guard.moved.number, difference(found, host * (host + 1))


def test_device_guard(asked):
    """An operation with operands on two devices is named, and its operands are moved."""
    ((moved, apart),) = asked.run(mix_devices)
    assert moved == 1
    assert apart <= TOLERANCE
