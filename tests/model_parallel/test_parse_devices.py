"""Devices and figures as a user writes them."""

import pytest
import torch

from mmdevplug.accelerators import Accelerator
from mmdevplug.errors import PlacementError
from mmdevplug.model_parallel import parse_devices, parse_max_memory, probe_capacities
from mmdevplug.utils.byte_sizes import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ('given', 'names'),
    [
        ('cuda:0-3', ['cuda:0', 'cuda:1', 'cuda:2', 'cuda:3']),
        ('xla:2', ['xla:2']),
        ('cuda:0, cuda:2', ['cuda:0', 'cuda:2']),
        ('cuda:0-1,cuda:4', ['cuda:0', 'cuda:1', 'cuda:4']),
        ('zeta:0,2', ['zeta:0', 'zeta:2']),
        ('zeta:0-1,3', ['zeta:0', 'zeta:1', 'zeta:3']),
        ('zeta:0,2-3', ['zeta:0', 'zeta:2', 'zeta:3']),
        (['xla:0', 'xla:2'], ['xla:0', 'xla:2']),
        ([torch.device('cuda', 1), 'cuda:0'], ['cuda:1', 'cuda:0']),
        ('cpu', ['cpu']),
        (torch.device('cpu'), ['cpu']),
    ],
)
def test_devices(given, names):
    assert parse_devices(given) == names


def test_devices_by_number():
    assert parse_devices(2, 'xla') == ['xla:0', 'xla:1']
    assert parse_devices([3, 'xla:1'], 'xla') == ['xla:3', 'xla:1']


def test_the_host_comes_last():
    assert parse_devices('cuda:0-1', exclude_cpu=False) == ['cuda:0', 'cuda:1', 'cpu']
    assert parse_devices(['cpu', 'cuda:0'], exclude_cpu=False) == ['cuda:0', 'cpu']


@pytest.mark.parametrize(
    ('given', 'words'),
    [
        ('', 'names no device'),
        ([], 'names no device'),
        (0, 'at least 1'),
        (None, 'expected'),
        (True, 'expected'),
        (2, 'of which type'),
        ('2', 'of which type'),
        ('2-3', 'of which type'),
        ('cpu:0,2', 'of which type'),
        ([-1], 'TYPE:INDEX'),
        ('cuda:0,cuda:0', 'cuda:0 more than once'),
        (['cuda:0-2', 'cuda:1'], 'cuda:1 more than once'),
        ('cuda', 'TYPE:INDEX'),
        ('cuda:3-1', 'ends before it begins'),
        ('cuda:0-99999999999', 'at most 4096'),
        (10**9, 'at most 4096'),
        ('cpu:1', 'TYPE:INDEX'),
        ('meta:0', 'TYPE:INDEX'),
        ('cuda:0;xla:1', 'TYPE:INDEX'),
        (['cuda:0', 'xla:0'], 'different types: cuda, xla'),
        (['cuda:0', 'cpu'], 'exclude_cpu=False'),
        (['cpu', 'cpu:0'], 'cpu more than once'),
    ],
)
def test_devices_that_cannot_be(given, words):
    with pytest.raises(PlacementError, match=words):
        parse_devices(given)


@pytest.mark.parametrize(
    'text', ['10GB', '1.5GiB', '7MB', '7MiB', '3KB', '3KiB', '80Gb', '5Mb', 12]
)
def test_sizes_are_read_as_accelerate_reads_them(text):
    from accelerate.utils.modeling import convert_file_size_to_int

    assert parse_bytes(text) == convert_file_size_to_int(text)


@pytest.mark.parametrize(
    'text', ['', 'GB', '-1GB', -1, '10 parsec', 1.5, None, True, 'infGB', 'nanGB']
)
def test_sizes_that_cannot_be_read(text):
    with pytest.raises(PlacementError, match="'10GB'"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ('size', 'text'),
    [
        (0, '0 bytes'),
        (1023, '1023 bytes'),
        (1024, '1.00 KiB'),
        (5 * 2**19, '2.50 MiB'),
        (2**40, '1024.00 GiB'),
    ],
)
def test_sizes_as_text(size, text):
    assert format_bytes(size) == text
    assert size < 1024 or parse_bytes(text) == size


def test_max_memory():
    devices = ['cuda:0', 'cuda:1', 'cpu']
    assert parse_max_memory({'cuda:0': '10GB', 1: 2**30, 'cpu': '1MB'}, devices) == {
        'cuda:0': 10**10,
        'cuda:1': 2**30,
        'cpu': 10**6,
    }
    assert parse_max_memory('cuda:1=8GB, 0=10GB', devices) == {
        'cuda:1': 8 * 10**9,
        'cuda:0': 10**10,
    }
    assert parse_max_memory(None, devices) == {}


@pytest.mark.parametrize(
    ('given', 'words'),
    [
        ({'cuda:7': 1}, "names 'cuda:7', which is none of the devices: cuda:0, cuda:1"),
        ({7: 1}, 'which is none of'),
        ({'cpu': 1}, 'exclude_cpu=False'),
        ({'cuda:0': 'much'}, r"max_memory\['cuda:0'\]='much'"),
        ({0: 1, 'cuda:0': 1}, 'cuda:0 twice'),
        ('cuda:0:10GB', 'DEVICE=SIZE'),
        ([1, 2], 'expected a dict'),
    ],
)
def test_max_memory_that_cannot_be(given, words):
    with pytest.raises(PlacementError, match=words):
        parse_max_memory(given, ['cuda:0', 'cuda:1'])


class Cards(Accelerator):
    """Two devices, whose memory the vendor reports or not."""

    name = device_type = 'xla'

    def __init__(self, totals):
        self.totals = totals

    def is_available(self):
        return bool(self.totals)

    def device_count(self):
        return len(self.totals)

    def set_device(self, device=None):
        raise AssertionError('no device is used here')

    synchronize = set_device

    def memory_total(self, device):
        return self.totals[device.index]


def test_probing():
    found = probe_capacities(['xla:0', 'xla:1', 'cpu'], Cards([5, 7]))
    assert found == {'xla:0': 5, 'xla:1': 7}
    assert probe_capacities(['xla:0', 'xla:1'], Cards([5, None])) == {}
    assert probe_capacities(['xla:0', 'xla:2'], Cards([5, 7])) == {}
    assert probe_capacities(['xla:0'], Cards([])) == {}
