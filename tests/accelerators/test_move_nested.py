"""Nested samples on their way to a device, and stacked there."""

from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from mmengine.config import ConfigDict
from mmengine.structures import BaseDataElement, InstanceData

from mmdevplug.accelerators import (
    Copies,
    DeviceContext,
    get_accelerator,
    set_device_context,
    to_device,
)
from mmdevplug.errors import SampleError
from mmdevplug.samples import stack_samples
from mmdevplug.utils.pytree import tensors_in
from tests.jobs import install_card
from tests.ranks import in_ranks

Pair = namedtuple('Pair', 'first second')


@dataclass(frozen=True)
class Frozen:
    value: torch.Tensor
    note: str = field(default='', compare=False)


class Sample(BaseDataElement):
    """As mmdet's and mmseg's are: what is set goes through a property."""

    @property
    def truth(self):
        return self._truth

    @truth.setter
    def truth(self, value):
        self.set_field(value, '_truth', dtype=InstanceData)


class Boxes:
    def __init__(self, tensor):
        self.tensor = tensor


def nested(device='cpu'):
    def tensor(*values):
        return torch.tensor(values, device=device)

    sample = Sample(metainfo=dict(shape=(2, 2)))
    sample.truth = InstanceData(boxes=tensor(1.0, 2.0))
    return dict(
        list=[tensor(1), 'a', None, b'b', 2.5],
        tuple=(tensor(2), {3}),
        pair=Pair(tensor(3), np.arange(2)),
        frozen=Frozen(tensor(4), 'note'),
        sample=sample,
        ordered=OrderedDict(x=tensor(5)),
        default=defaultdict(list, x=tensor(6)),
        config=ConfigDict(x=tensor(7)),
        boxes=Boxes(tensor(8)),
    )


def test_what_is_there_already_is_the_same_object():
    sample = nested()
    assert to_device(sample, 'cpu') is sample
    assert to_device([1, 'a'], 'cpu') == [1, 'a']


def test_all_tensors_are_found_in_order():
    found = [each.tolist() for each in tensors_in(nested())]
    assert found == [[1], [2], [3], [4], [1.0, 2.0], [5], [6], [7], [8]]


@in_ranks()
def test_tensors_travel_in_one_call():
    install_card('zeta')
    accelerator = get_accelerator('zeta')
    set_device_context(DeviceContext(accelerator, 'a test', accelerator.device(0)))
    calls = dict(to_device=[], to_host=[])

    def count(name):
        move_them = getattr(Copies, name)

        def counted(self, tensors, *device):
            calls[name].append(len(tensors))
            return move_them(self, tensors, *device)

        setattr(Copies, name, counted)

    for name in calls:
        count(name)
    before = nested()
    shared = torch.zeros(1)
    before['again'] = [shared, shared]
    there = to_device(before, 'zeta:2')
    back = to_device(there, 'cpu')
    across = to_device(there, torch.device('zeta', 1))
    leaf = torch.ones(1, requires_grad=True)
    moved = to_device(dict(x=leaf), 'zeta:1')['x']
    moved.sum().backward()
    assert there['again'][0] is there['again'][1]
    assert there['frozen'].note == 'note'
    assert there['default'].default_factory is list
    assert there['sample'].truth.boxes.device.index == 2
    assert 'truth' in there['sample']
    assert before['sample'].truth.boxes.device.type == 'cpu'
    assert {str(each.device) for each in tensors_in(there)} == {'zeta:2'}
    assert {str(each.device) for each in tensors_in(across)} == {'zeta:1'}
    arrived = [each.tolist() for each in tensors_in(back)]
    assert arrived == [[1], [2], [3], [4], [1.0, 2.0], [5], [6], [7], [8], [0.0], [0.0]]
    names = 'list tuple Pair Frozen Sample OrderedDict defaultdict ConfigDict Boxes list'
    assert [type(each).__name__ for each in back.values()] == names.split()
    assert leaf.grad.tolist() == [1.0]
    # A tensor that occurs twice is sent once.
    assert calls == dict(to_device=[10], to_host=[10])


def test_samples_become_a_batch():
    samples = [
        dict(
            image=torch.full((2,), float(n)),
            label=n,
            score=n / 2,
            right=n > 0,
            array=np.full(3, n, np.int16),
            count=np.float32(n),
            text=str(n),
            pair=Pair(torch.tensor(n), None),
            several=(n, torch.zeros(0)),
        )
        for n in range(3)
    ]
    samples[1] = dict(reversed(list(samples[1].items())))
    batch = stack_samples(samples, 'cpu')
    assert list(batch) == list(samples[0])
    assert batch['image'].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert (batch['label'].tolist(), batch['label'].dtype) == ([0, 1, 2], torch.int64)
    assert (batch['score'].tolist(), batch['score'].dtype) == ([0, 0.5, 1], torch.float32)
    assert batch['right'].tolist() == [False, True, True]
    assert (batch['array'].shape, batch['array'].dtype) == ((3, 3), torch.int16)
    assert batch['count'].dtype == torch.float32
    assert batch['text'] == ['0', '1', '2']
    assert type(batch['pair']) is Pair
    assert batch['pair'].first.tolist() == [0, 1, 2]
    assert batch['pair'].second == [None, None, None]
    assert batch['several'][1].shape == (3, 0)


def test_data_elements_stay_a_list():
    samples = [InstanceData(labels=torch.arange(n)) for n in range(3)]
    assert [len(each) for each in stack_samples(samples, 'cpu')] == [0, 1, 2]


@pytest.mark.parametrize(
    ('other', 'words'),
    [
        (dict(x=dict(y=torch.zeros(3))), "sample['x']['y']: sample 1 has a tensor of shape (3,)"),
        (dict(x=dict(y=torch.zeros(2).int())), 'dtype int32, sample 0 has a tensor of shape (2,)'),
        (dict(x=dict(y='a')), "sample['x']['y']: sample 1 has str"),
        (dict(x=dict(z=0)), "sample['x']: sample 1 has the keys ['z'], sample 0 has the keys"),
        (dict(x=(1,)), "sample['x']: sample 1 has tuple, sample 0 has dict"),
    ],
)
def test_what_cannot_be_stacked_is_named(other, words):
    with pytest.raises(SampleError) as raised:
        stack_samples([dict(x=dict(y=torch.zeros(2))), other], 'cpu')
    assert words in str(raised.value)
