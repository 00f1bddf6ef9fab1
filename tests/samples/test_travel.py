"""Samples as bytes and back, in one process: nothing lost, nothing run, nothing believed."""

import io
import json
import pickle
import threading

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from mmdevplug.distributed import wire
from mmdevplug.distributed.wire import dumps, loads
from mmdevplug.errors import SampleError
from mmdevplug.samples import gather_samples, register_sample_type, stack_samples
from mmdevplug.samples.structures import describe_samples

from . import values
from .values import bits, pools


def write(samples, allow_pickle=False):
    describe_samples(samples, allow_pickle)
    return dumps(samples, allow_pickle)


def there_and_back(samples, allow_pickle=False):
    # From another address, as on another rank.
    return loads(write(samples, allow_pickle).clone(), trusted=allow_pickle)


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


def test_samples_of_this_rank_are_detached_too():
    learned = torch.ones(2, requires_grad=True) * 2
    assert not any(each.requires_grad for each in gather_samples([torch.zeros(2), learned]))


def test_a_sample_costs_a_few_bytes_besides_its_data():
    make = dict(
        alike=lambda n: dict(x=torch.full((300,), float(n)), y=torch.tensor([n]), z='text'),
        two_kinds=lambda n: dict(x=torch.zeros(300 + n % 2), y=n, z=[n] * (n % 3 + 1)),
    )
    for each in make.values():
        assert write([each(n) for n in range(100)]).numel() <= 126_000


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
        describe_samples([dict(a=1), sample])
    assert place in str(raised.value)
    assert kind in str(raised.value)


def test_a_sample_that_contains_itself_is_refused():
    sample = []
    sample.append(sample)
    with pytest.raises(SampleError, match='does one contain itself'):
        describe_samples([sample])


def test_pickles_are_for_those_who_ask():
    sample = dict(x=Private(torch.arange(3.0)))
    (arrived,) = there_and_back([sample], allow_pickle=True)
    assert type(arrived['x']) is Private
    assert [tensor.tolist() for tensor in arrived['x'].tensors] == [[0, 1, 2], [0, 2, 4]]
    data = write([sample], allow_pickle=True)
    assert b'storage' not in data.numpy().tobytes()  # tensors are packed, not pickled
    with pytest.raises(SampleError, match='allow_pickle=True if you trust'):
        loads(data)


class Episode:
    def __init__(self, *_):
        raise AssertionError('a constructor was called')


def test_classes_that_are_registered_travel_without_their_constructors():
    episode = object.__new__(Episode)
    episode.frames, episode.name = torch.ones(2), 'a'
    with pytest.raises(SampleError, match='register_sample_type'):
        describe_samples([episode])
    register_sample_type(Episode)
    (arrived,) = there_and_back([episode])
    assert type(arrived) is Episode
    assert (arrived.frames.tolist(), arrived.name) == ([1, 1], 'a')
    assert stack_samples([episode] * 2, 'cpu') == [episode] * 2
    register_sample_type(Episode, lambda value: value.name, lambda name: name.upper())
    assert there_and_back([dict(x=episode)]) == [dict(x='A')]


class Called(Exception):
    pass


class Trap:
    def __reduce__(self):
        return (_spring, ())


def _spring():
    raise Called


def raw(pickled, table=(), room=0):
    """A message with a table or a pickle that no sender of ours would write."""
    text = json.dumps(table).encode()
    head = wire._HEAD.pack(wire.VERSION, len(text), len(pickled)) + text + pickled
    return wire.to_tensor(head + bytes(-len(head) % 64 + room))


@pytest.mark.parametrize(
    'pickled',
    [
        b'cos\nsystem\n(S"true"\ntR.',
        b'cbuiltins\neval\n(S"1"\ntR.',
        b'csubprocess\nPopen\n(S"true"\ntR.',
        b'cnot.imported\nClass\n.',
        f'c{__name__}\nTrap\n.'.encode(),
        f'c{__name__}\n_spring\n(tR.'.encode(),
        # A class of samples is neither called, nor made, nor changed.
        b'ctests.samples.values\nImage\n(tR.',
        b'ctests.samples.values\nImage\n)\x81.',
        b'(ctests.samples.values\nImage\no.',
        b'ctests.samples.values\nImage\n(N}S"label"\nK\x05stb.',
        b'cmmdevplug.distributed.wire\nloads\n.',
        b'cmmdevplug.distributed.wire\n_HEAD\n.',
        b'cmmdevplug.distributed.wire\npickle.loads\n.',
        b'\x97.',
        b'nonsense',
        b'',
    ],
)
def test_a_pickle_cannot_choose_what_is_run_or_changed(pickled):
    with pytest.raises(SampleError):
        loads(raw(pickled))
    assert values.Image.label == 0


class Refers(pickle.Pickler):
    """Writes what a sender of ours would not: a reference of any kind."""

    def persistent_id(self, value):
        return value.pid if isinstance(value, Refers.To) else None

    class To:
        def __init__(self, *pid):
            self.pid = pid


def referring(*pid, then=b''):
    file = io.BytesIO()
    Refers(file, protocol=5).dump(Refers.To(*pid))
    return raw(file.getvalue()[:-1] + then + b'.')


IMAGE = ('parts', 'tests.samples.values', 'Image', ('pixels', 'label'), [1, 2])


def test_a_container_is_built_of_its_parts_and_cannot_be_changed():
    assert loads(referring(*IMAGE)).label == 2
    for change in (b'}S"label"\nK\x05sb', b'K\x05a', b')R'):
        with pytest.raises(SampleError):
            loads(referring(*IMAGE, then=change))


@pytest.mark.parametrize(
    'pid',
    [
        ('parts', 'os', 'system', ('x',), ['true']),
        ('parts', __name__, 'Trap', (), []),
        ('parts', 'not.imported', 'Class', (), []),
        ('parts', 'builtins', 'int', ('x',), [1]),
        ('parts', 'collections', 'OrderedDict', ('x',), []),
        ('parts', 'collections', 'OrderedDict', ([],), ['']),
        ('parts', 'tests.samples.values', 'Detections', ('x',), ['']),
        ('no such word', 1),
        ('scalar', 0, 0),
        ('text',),
        ('complex', 'i'),
        (0, 0),
        (),
    ],
)
def test_references_that_no_sender_makes_are_refused(pid):
    with pytest.raises(SampleError):
        loads(referring(*pid))


@pytest.mark.parametrize(
    'table',
    [[['load', [1], 1]], [['|O', [1], 1]], [['float32', [-1], 1]], [['float32', [9], 9]], 7],
)
def test_tables_that_no_sender_writes_are_refused(table):
    with pytest.raises(SampleError):
        loads(raw(pickle.dumps(0), table, room=64))


def test_a_trap_is_not_sprung():
    with pytest.raises(SampleError, match='_spring, which this rank does not know'):
        loads(dumps([Trap()]))
    with pytest.raises(SampleError, match='Called'):
        loads(dumps([Trap()], trusted=True), trusted=True)


@pytest.mark.parametrize(
    ('table', 'pickled'),
    [
        ([['<f4', [0], 10**9]], pickle.dumps([], 5)),
        ([['float32', [0], 10**9]], pickle.dumps([], 5)),
        ([['float32', [0], -1], ['float32', [0], 1]], pickle.dumps([], 5)),
        ([], b'\x80\x05K\x01' + b'2\x86' * 60 + b'.'),  # pairs of one pair, to a depth of 60
        ([], b'\x80\x05K\x01' + b'2\x86' * 24 + b'\x85' * 24 + b'.'),
    ],
)
def test_no_more_is_built_than_a_message_has_bytes(monkeypatch, table, pickled):
    made, built = [], wire._Builder.built
    monkeypatch.setattr(wire._Builder, 'built', lambda *args: (made.append(1), built(*args))[1])
    with pytest.raises(SampleError):
        loads(raw(pickled, table))
    assert len(made) <= 2 * len(pickled) + 2


def test_containers_without_end_are_refused():
    with pytest.raises(SampleError):
        loads(raw(b']' * 100_000 + b'a' * 99_999 + b'.'))


@pytest.mark.parametrize('change', [slice(None, -64), slice(None, 64), slice(64, None)])
def test_messages_that_are_cut_off_are_refused(change):
    data = write([torch.arange(99.0)] * 3)
    with pytest.raises(SampleError, match='do not fit together'):
        loads(data[change])
    with pytest.raises(SampleError, match='do not fit together'):
        loads(torch.cat([data, data.new_zeros(64)]))


def test_other_fields_of_a_class_are_named():
    pid = ('parts', 'tests.samples.values', 'Rollout', ('prompt',), [''])
    with pytest.raises(SampleError, match=r"fields \['prompt'\], which here has \['prompt', 'tok"):
        loads(referring(*pid))


def test_messages_of_another_version_are_refused(monkeypatch):
    data = dumps([])
    monkeypatch.setattr(wire, 'VERSION', wire.VERSION - 1)
    with pytest.raises(SampleError, match='same release of mmdevplug'):
        loads(data)


def test_an_object_in_two_samples_arrives_as_two():
    sample = dict(x=torch.zeros(1))
    one, other = there_and_back([sample, sample])
    one['x'] += 1
    assert (one['x'].tolist(), other['x'].tolist()) == ([1], [0])
