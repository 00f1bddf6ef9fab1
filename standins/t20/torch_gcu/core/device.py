"""Cards: how many, which is current."""

from typing import Union

import torch
from t20_card import calls, card

from ..utils import LazyProperty

_device_t = Union[torch.device, str, int, None]
_COUNT = LazyProperty(card.device_count)

__all__ = [
    'is_available',
    'device_count',
    'gcu_device',
    'device',
    'device_of',
    'set_device',
    'current_device',
    'get_device_name',
]


def _index_of(device, optional=False):
    """Read an index; without one the current card's if ``optional``."""
    if isinstance(device, str):
        device = torch.device(device)
    if isinstance(device, int):
        return device
    if isinstance(device, torch.device) and device.type != 'xla':
        raise ValueError(f'Expected a gcu device, but got: {device}')
    index = device.index if isinstance(device, torch.device) else None
    if index is not None:
        return index
    if optional:
        return card.current_device()
    raise ValueError(
        f'Expected a torch.device with a specified index or an integer, but got:{device}'
    )


def _exists(index):
    return 0 <= index < _COUNT.value


def _check_exists(index):
    if not _exists(index):
        raise IndexError(f'Invalid device id, must in [0, {_COUNT.value - 1}], got {index}')


def is_available():
    return _COUNT.value > 0


def device_count():
    return _COUNT.value


def gcu_device(device=None):
    # The vendor's checks no index here: PyTorch refuses it where the device is used.
    calls['gcu_device'] += 1
    return torch.device(f'xla:{_index_of(device, optional=True)}')


class device:
    """Makes a card the current one for a while. An index that does not exist changes nothing."""

    def __init__(self, device):
        self.idx = _index_of(device, optional=True)
        self.prev_idx = -1

    def __enter__(self):
        if _exists(self.idx):
            self.prev_idx = card.current_device()
            set_device(self.idx)

    def __exit__(self, *error):
        set_device(self.prev_idx)
        return False


class device_of(device):
    """Makes the card of a tensor the current one; nothing for a tensor elsewhere."""

    def __init__(self, obj):
        super().__init__(obj.device if obj.device.type == 'xla' else -1)


def set_device(device):
    calls['set_device'] += 1
    index = _index_of(device)
    if _exists(index):
        card.set_device(index)


def current_device():
    return card.current_device() if is_available() else None


def get_device_name(device=None):
    _check_exists(_index_of(device, optional=True))
    return 'T20 (stand-in)'
