"""Named and shaped like TorchTPU, for tests: see native_card.

As there, a process has one device once its runtime has started, whatever its rank, and cannot
choose another; before, all devices of the host are counted. One of several processes starts only
with the variables for the network between the chips. The functions of ``torch.tpu`` that the
release keeps for PyTorch's own callers are for everyone here: tests/tpu has those of the release.
"""

import os
import socket
import sys
from importlib import import_module
from types import ModuleType

import card
import native_card
import torch

tpu = native_card.install(native_card.TPU)
#: What TorchTPU's module offers; the plain card has more.
_PUBLIC = """
Event Stream current_device current_stream default_stream device_count get_amp_supported_dtype
get_device_name get_device_properties get_rng_state is_available is_initialized manual_seed_all
set_device set_rng_state set_stream stream synchronize
"""
_extra = [name for name in vars(tpu) if name[0] != '_' and name not in _PUBLIC.split()]
for _name in _extra:
    delattr(tpu, _name)

_plain = {
    name: getattr(tpu, name) for name in ('current_device', 'get_rng_state', 'set_rng_state')
}
_listening = []


def _start():
    """Start the runtime, as the first use of the device does."""
    if _listening:
        return
    ranks = int(os.environ.get('WORLD_SIZE', '1'))
    server = socket.socket()
    if ranks > 1:
        addresses = os.environ['TORCH_TPU_SLICEBUILDER_ADDRESSES'].split(',')
        shape = os.environ['TORCH_TPU_TOPOLOGY']
        chips = 1
        for number in shape.split(','):
            chips *= int(number)
        if not len(addresses) == ranks == chips:
            raise RuntimeError(f'{ranks} processes, {len(addresses)} addresses, topology {shape}')
        host, port = addresses[int(os.environ['RANK'])].split(':')
        server.bind((host, int(port)))
    _listening.append(server)
    card.build().set_count(1)


def _current_device():
    _start()
    return _plain['current_device']()


def _set_device(device):
    index = device if isinstance(device, int) else torch.device(device).index
    if index not in (None, _current_device()):
        raise ValueError(f'Cannot set TPU device to index {index}')


def _of_this_device(function):
    def checked(*args):
        devices = [arg for arg in args if isinstance(arg, (torch.device, int, str))]
        if any(torch.device(each).index not in (None, _current_device()) for each in devices):
            raise ValueError(f'not the current device: {devices}')
        return function(*args)

    return checked


tpu.current_device, tpu.set_device = _current_device, _set_device
tpu.get_rng_state = _of_this_device(_plain['get_rng_state'])
tpu.set_rng_state = _of_this_device(_plain['set_rng_state'])
tpu.is_initialized = lambda: bool(_listening)


_launching = import_module('torch_tpu._internal.distributed')
tpu.distributed = sys.modules['torch.tpu.distributed'] = ModuleType('torch.tpu.distributed')
tpu.distributed.set_tpu_launch_env = _launching.set_tpu_launch_env
