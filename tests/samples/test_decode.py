"""Samples as bytes and back, in one process: nothing lost, nothing run, nothing believed."""

import pickle
import re
import threading

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from mmdevplug.distributed.byte_exchange import to_tensor
from mmdevplug.errors import SampleError
from mmdevplug.samples.decode import decode, unflatten_samples
from mmdevplug.samples.encode import VERSION, Block, encode, flatten_samples, pack

from .values import bits, pools


def read(data, allow_pickle=False):
    return unflatten_samples(decode(data), torch.device('cpu'), allow_pickle)


def there_and_back(samples, allow_pickle=False):
    # From another address, as on another rank.
    return read(encode(flatten_samples(samples, allow_pickle)).clone(), allow_pickle)


@settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(st.booleans().flatmap(lambda same: pools(1, 5, same)))
def test_all_samples_arrive_as_they_were(pool):
    (samples,) = pool
    assert bits(there_and_back(samples)) == bits(samples)


def bytes_held(tensor):
    return len(tensor.storage()) * tensor.element_size()


def test_tensors_have_memory_of_their_own():
    samples = [torch.arange(4.0), torch.ones(2), torch.zeros(2)]
    arrived = there_and_back(samples)
    storages = {tensor.storage().data_ptr() for tensor in arrived}
    assert len(storages) == 3
    assert [bytes_held(tensor) for tensor in arrived] == [16, 8, 8]
    # Changing one must not count as a change of another, which autograd would refuse.
    versions = [tensor._version for tensor in arrived]
    arrived[0].add_(1)
    assert [tensor._version for tensor in arrived] == [versions[0] + 1, *versions[1:]]


def test_arrays_can_be_written_to():
    array, without_dimensions = there_and_back([np.arange(3), np.array(2)])
    array[0] = 7
    assert array.tolist() == [7, 1, 2]
    without_dimensions[()] = 8
    assert without_dimensions.tolist() == 8


def test_gradients_and_views_arrive_as_plain_tensors():
    parameter = torch.nn.Parameter(torch.arange(6.0).view(2, 3))
    conjugated = torch.tensor([1 + 2j, 3 - 4j]).conj()
    arrived = there_and_back([parameter.t(), parameter, conjugated, conjugated.imag])
    assert [type(each) for each in arrived] == [torch.Tensor] * 4
    assert not any(each.requires_grad or each.is_conj() or each.is_neg() for each in arrived)
    assert torch.equal(arrived[0], parameter.detach().t())
    assert arrived[2].tolist() == [1 - 2j, 3 + 4j]
    assert arrived[3].tolist() == [-2.0, 4.0]


def test_a_sample_costs_a_few_bytes_besides_its_data():
    make = dict(
        alike=lambda n: dict(x=torch.full((300,), float(n)), y=torch.tensor([n]), z='text'),
        two_kinds=lambda n: dict(x=torch.zeros(300 + n % 2), y=n, z=[n] * (n % 3 + 1)),
    )
    for each in make.values():
        assert encode(flatten_samples([each(n) for n in range(100)])).numel() <= 122_500


class Private:
    def __init__(self, tensor):
        self.tensors = [tensor, tensor * 2]
        self.lock_free = True


@pytest.mark.parametrize(
    ('sample', 'place', 'kind'),
    [
        (dict(a=[0, dict(b=threading.Lock())]), "sample 1['a'][1]['b']", '_thread.lock'),
        ((1, {2}), 'sample 1[1]', 'builtins.set'),
        (dict(x=Private(torch.zeros(1))), "sample 1['x']", 'Private'),
        (dict(x=np.array([{}])), "sample 1['x']", 'dtype object'),
        (dict(x=torch.zeros(2, 2).to_sparse()), "sample 1['x']", 'torch.sparse_coo'),
        (dict(x=torch.zeros(1, device='meta')), "sample 1['x']", 'meta'),
        ({frozenset(): 1}, 'sample 1', 'the key frozenset()'),
    ],
)
def test_what_cannot_travel_is_named_with_its_place(sample, place, kind):
    with pytest.raises(SampleError) as raised:
        flatten_samples([dict(a=1), sample])
    assert place in str(raised.value)
    assert kind in str(raised.value)


def test_a_sample_that_contains_itself_is_refused():
    sample = []
    sample.append(sample)
    with pytest.raises(SampleError, match='does one contain itself'):
        flatten_samples([sample])


def test_pickles_are_for_those_who_ask():
    sample = dict(x=Private(torch.arange(3.0)))
    (arrived,) = there_and_back([sample], allow_pickle=True)
    assert type(arrived['x']) is Private
    assert [tensor.tolist() for tensor in arrived['x'].tensors] == [[0, 1, 2], [0, 2, 4]]
    data = encode(flatten_samples([sample], allow_pickle=True))
    assert b'storage' not in data.numpy().tobytes()  # tensors are packed, not pickled
    with pytest.raises(SampleError, match='allow_pickle=True if you trust'):
        read(data)


def message(structure, *leaves, rows=1):
    header = pack([VERSION, [[structure, rows, list(leaves)]]])
    length = 8 + len(header)
    padding = bytes(-length % 64)
    return to_tensor(len(header).to_bytes(8, 'little') + header + padding)


def block(*shape, dtype=torch.float32):
    return Block(dtype, shape, [])


class Called(Exception):
    pass


class Trap:
    def __reduce__(self):
        return (_spring, ())


def _spring():
    raise Called


@pytest.mark.parametrize(
    'structure',
    [
        ('dataclass', 'subprocess:Popen', ('args',), ('str',)),
        ('dataclass', 'os:system', ('command',), ('str',)),
        ('named tuple', 'builtins:eval', ('x',), ('str',)),
        ('data element', 'builtins:object', (), ()),
        ('data element', 'not.imported:Class', (), ()),
        ('dataclass', f'{__name__}:Trap', (), ()),
        ('exec', '', (), ()),
        'array |O',
        'scalar |O',
        'tensor load',
        ('pickle', '', (), ('bytes',)),
        'no such word',
        ('list', '', ('str',)),
        7,
    ],
)
def test_a_message_cannot_choose_what_is_run(structure):
    with pytest.raises(SampleError):
        read(message(structure, [pickle.dumps(Trap())]))


@pytest.mark.parametrize(
    ('code', 'content', 'words'),
    [
        (0, ['load', [1]], "a tensor of dtype 'load'"),
        (0, ['os', [1]], "a tensor of dtype 'os'"),
        (4, ['|O', [1], bytes(8)], "the dtype '|O'"),
        (4, ['|u1', [1 << 10], b'abc'], 'do not fit together'),
        (100, [], 'the code 100'),
    ],
)
def test_a_message_cannot_choose_what_is_made(code, content, words):
    value = msgpack.ExtType(code, msgpack.packb(content))
    with pytest.raises(SampleError, match=re.escape(words)):
        read(message('int', [value]))


def test_a_message_that_nests_without_end_is_refused():
    value = msgpack.packb(0)
    for _ in range(2000):
        value = msgpack.packb(msgpack.ExtType(0, value))
    with pytest.raises(SampleError):
        read(message('int', [msgpack.ExtType(0, value)]))
    structure = 'int'
    for _ in range(100):
        structure = ('list', '', (), (structure,))
    with pytest.raises(SampleError):
        read(message(structure, [0]))


@pytest.mark.parametrize(
    ('structure', 'leaves'),
    [
        ('float', [bytes(16)]),
        ('float', [[0.0] * 2]),
        ('int', [[1] * 3, [2] * 3]),
        ('int', []),
        ('list int', [[1, 2, 3]]),
        ('array |u1', [[b'abc'] * 3]),
        ('tensor float32', [[0.0] * 3]),
        ('tensor float32', [block(1 << 40)]),
        ('tensor float32', [block(1 << 10)]),
        (('tuple', '', (), ('int', 'int')), [[1] * 3]),
    ],
)
def test_columns_that_do_not_fit_are_refused(structure, leaves):
    with pytest.raises(SampleError, match='do not fit together'):
        read(message(structure, *leaves, rows=3))


def test_bytes_behind_the_last_tensor_are_refused():
    data = encode(flatten_samples([torch.arange(4.0)]))
    with pytest.raises(SampleError, match='do not fit together'):
        read(torch.cat([data, data.new_zeros(64)]))


@pytest.mark.parametrize('rows', [[0, 0], [1, 2], [-1, 0]])
def test_rows_that_are_not_those_of_all_samples_are_refused(rows):
    with pytest.raises(SampleError, match='do not fit together'):
        read(message('int', [1, 2], rows=rows))


def test_other_fields_of_a_class_are_named():
    structure = ('dataclass', 'tests.samples.values:Rollout', ('prompt',), ('str',))
    with pytest.raises(SampleError, match=r"fields \['prompt'\], which here has \['prompt', 'tok"):
        read(message(structure, ['']))


def test_messages_of_another_version_are_refused():
    header = msgpack.packb([VERSION - 1, b'', []])
    with pytest.raises(SampleError, match='same release of mmdevplug'):
        read(to_tensor(len(header).to_bytes(8, 'little') + header))


def test_arrays_too_large_for_msgpack_are_named(monkeypatch):
    monkeypatch.setattr('mmdevplug.samples.encode.MOST_ARRAY_BYTES', 10)
    with pytest.raises(SampleError, match=r"sample 0\['x'\] is an array of 16 bytes; expected at"):
        flatten_samples([dict(x=np.zeros(2))])
