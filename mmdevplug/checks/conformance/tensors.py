"""Check copies, random numbers, checkpoints and operations that mix devices: one process."""

import os
import tempfile
from typing import Callable, Dict, List

import torch
from torch import Tensor, nn

from mmdevplug.accelerators.probe import difference
from mmdevplug.accelerators.random_states import random_state, set_random_state
from mmdevplug.checkpoint.host_copy import HostCopy
from mmdevplug.checkpoint.writing import write_checkpoint
from mmdevplug.device_guard import DeviceGuard
from mmdevplug.errors import DeviceMismatchError, first_line
from mmdevplug.staged.host_buffers import HostBuffers, pins_memory

from .card import TOLERANCE, Card, Failed, NotSupported, require

#: Every model needs these on its device; of others the report says which there are.
NEEDED_DTYPES = (torch.float32, torch.int64, torch.int32, torch.uint8, torch.bool)
OTHER_DTYPES = (torch.float16, torch.bfloat16, torch.float64, torch.int16, torch.int8)

#: Layouts of a host tensor of shape (4, 6, 5, 3).
LAYOUTS: Dict[str, Callable[[Tensor], Tensor]] = {
    'contiguous': lambda host: host,
    'transposed': lambda host: host.transpose(0, 3),
    'every second element': lambda host: host[::2, 1::2],
    'expanded': lambda host: host[:1].expand(4, 6, 5, 3),
    'channels last': lambda host: host.contiguous(memory_format=torch.channels_last),
    'of zero size': lambda host: host[:0],
    'of one value': lambda host: host[0, 0, 0, 0],
}


def _numbers(dtype: torch.dtype = torch.float32) -> Tensor:
    return (
        (torch.arange(4 * 6 * 5 * 3, device='cpu') % 2**7 - 60).abs().reshape(4, 6, 5, 3).to(dtype)
    )


def check_copies(card: Card) -> str:
    """Copy tensors of all dtypes and layouts to the device, on it, and back, and compare bits."""
    missing: List[str] = []
    for dtype in (*NEEDED_DTYPES, *OTHER_DTYPES):
        try:
            _copy_layouts(card, dtype)
        except (RuntimeError, TypeError, NotImplementedError) as error:
            if dtype in NEEDED_DTYPES:
                raise Failed(f'{dtype}: {type(error).__name__}: {first_line(error)}') from error
            missing.append(str(dtype))
    others = [card.accelerator.device(rank) for rank in range(min(2, card.asked['ranks'] or 1))]
    if len(others) > 1:
        card.say(f'copying from {others[0]} to {others[1]}')
        (found,) = card.accelerator.copies.to_host([_numbers().to(others[0]).to(others[1])])
        _same(found, _numbers(), f'float32 from {others[0]} to {others[1]}')
    count = len(NEEDED_DTYPES + OTHER_DTYPES) - len(missing)
    return (
        f'{count} dtypes in {len(LAYOUTS)} layouts are the same bits after the way to '
        f'{card.device} and back{", and from device to device" if len(others) > 1 else ""}; '
        f'{_copy_pinned(card)}{"; no " + ", ".join(missing) if missing else ""}'
    )


def _copy_layouts(card: Card, dtype: torch.dtype) -> None:
    accelerator = card.accelerator
    for name, lay_out in LAYOUTS.items():
        what = f'{dtype}, {name}'
        card.say(f'copying {what}')
        host = lay_out(_numbers(dtype))
        on_device = host.to(card.device)
        there = lay_out(_numbers(dtype).to(card.device))
        found, again = accelerator.copies.to_host([on_device, there])
        _same(found, host, f'{what}, sent and fetched')
        _same(again, host, f'{what}, laid out on the device')
        # As gradients travel: into tensors that are there.
        (sent,) = accelerator.copies.to_device([host], card.device)
        target, fetched = torch.zeros_like(sent), torch.zeros(host.shape, dtype=dtype)
        accelerator.copies.into_device([host], [target])
        accelerator.compilation.materialize(card.device, [target])
        accelerator.copies.into_host([target], [fetched])
        _same(fetched, host, f'{what}, into existing tensors')


def _copy_pinned(card: Card) -> str:
    if not pins_memory(card.device.type):
        return 'pinned memory is not used'
    card.say('copying from and to pinned memory')
    on_device = _numbers().pin_memory().to(card.device, non_blocking=True)
    buffers = HostBuffers()
    found = buffers.read(on_device, later=True)
    buffers.wait_for_copies()
    _same(found.view(on_device.shape), _numbers(), 'float32, from and to pinned memory')
    return 'pinned memory is used'


def _same(found: Tensor, expected: Tensor, what: str) -> None:
    if found.device.type != 'cpu' or found.dtype != expected.dtype:
        raise Failed(f'{what}: came back as {found.dtype} on {found.device}')
    if found.shape != expected.shape or not torch.equal(found, expected):
        raise Failed(f'{what}: differs by {difference(found, expected):.2g}')


def check_random_numbers(card: Card) -> str:
    """Check that seeds and saved states bring the same numbers on the device again."""
    accelerator, device = card.accelerator, card.device

    def draw() -> Tensor:
        card.say(f'drawing random numbers on {device}')
        return card.fetch([torch.rand(1000, device=device)])[0]

    def seeded(seed: int) -> Tensor:
        torch.manual_seed(seed)
        accelerator.manual_seed(seed)
        return draw()

    first, following = seeded(1), draw()
    if not 0.4 < first.mean().item() < 0.6 or first.min() < 0 or first.max() >= 1:
        raise Failed(f'torch.rand on {device} is not uniform: mean {first.mean():.3f}')
    if torch.equal(first, following):
        raise Failed(f'torch.rand on {device} draws the same numbers twice')
    if not torch.equal(first, seeded(1)) or torch.equal(first, seeded(2)):
        raise Failed(f'a seed does not decide the numbers of torch.rand on {device}')
    accelerator.renew_rng()
    state = random_state(accelerator, [device])
    expected = draw()
    lost = set_random_state(state, accelerator, [device])
    if lost is not None:
        raise NotSupported(f'seeds work, but a resumed run draws other numbers: {lost}')
    if not torch.equal(draw(), expected):
        raise Failed(f'a restored state of the generator of {device} draws other numbers')
    return 'the same seed and the same saved state draw the same numbers'


def check_checkpoint(card: Card) -> str:
    """Save the states of a model and its optimizer, and load them on the CPU and on the device."""
    device = card.device
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)).to(device)
    optimizer = torch.optim.Adam(model.parameters())
    inputs = torch.sin(torch.arange(40.0)).reshape(5, 8)
    model(inputs.to(device)).pow(2).sum().backward()
    optimizer.step()
    state = dict(model=model.state_dict(), optimizer=optimizer.state_dict())
    on_host = HostCopy(card.accelerator)(state)
    loaded = {}
    with tempfile.TemporaryDirectory(prefix='mmdevplug-conformance-') as folder:
        path = os.path.join(folder, 'written.pth')
        card.say('writing a checkpoint')
        write_checkpoint(on_host, path)
        loaded['a checkpoint'] = torch.load(path, map_location='cpu')
        if not card.accelerator.compilation.lazy:  # on which torch.load puts them in any case
            card.say('torch.save of tensors on the device')
            torch.save(state['model'], path)
            loaded['torch.save'] = dict(model=torch.load(path, map_location='cpu'))
    for how, found in loaded.items():
        for name, value in on_host['model'].items():
            _same(found['model'][name], value, f'{how}, {name}')
    card.say('loading a checkpoint')
    other = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 4))
    other.load_state_dict(loaded['a checkpoint']['model'])
    expected = other.eval()(inputs)
    moved = other.to(device)
    resumed = torch.optim.Adam(moved.parameters())
    resumed.load_state_dict(loaded['a checkpoint']['optimizer'])
    moments = [each['exp_avg'] for each in resumed.state.values()]
    if {each.device for each in moments} != {device}:
        raise Failed(f'the optimizer, loaded, is on {moments[0].device}, expected {device}')
    (outputs,) = card.fetch([moved(inputs.to(device))])
    apart = require(
        difference(outputs, expected.detach()), 10 * TOLERANCE, 'outputs after loading'
    )
    return f'saved, loaded on the CPU and on {device}; outputs differ by {apart}'


def check_device_guard(card: Card) -> str:
    """Check that an operation with operands on two devices is named, or its operands moved."""
    device = card.device
    if device.type == 'cpu':
        raise NotSupported('the CPU is one device, with which nothing can be mixed')
    if not hasattr(torch.overrides, 'TorchFunctionMode'):
        raise NotSupported('DeviceGuard needs PyTorch 1.13')
    host = torch.arange(6.0).reshape(2, 3)
    on_device = (host + 1).to(device)
    card.say('mixing devices under DeviceGuard')
    try:
        with DeviceGuard('error'):
            mixed = host * on_device
    except DeviceMismatchError as error:
        if str(device) not in str(error) or 'cpu' not in str(error):
            raise Failed(f'the message names no devices: {first_line(error)}') from error
    else:
        raise Failed(f'host * {device} was not noticed; its result is on {mixed.device}')
    with DeviceGuard('move') as guard:
        moved = host * on_device
    (found,) = card.fetch([moved])
    apart = require(difference(found, host * (host + 1)), TOLERANCE, 'products of moved operands')
    return f'named, and {guard.moved.number} operand(s) moved; results differ by {apart}'
