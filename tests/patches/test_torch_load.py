"""``torch.load`` while a model's own code runs: every argument kept, each thread by itself."""

import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import numpy as np
import pytest
import torch
from mmengine.logging import HistoryBuffer
from mmengine.runner import CheckpointLoader
from torch import nn

from mmdevplug import patch_mmengine
from mmdevplug.accelerators import get_accelerator
from mmdevplug.distributed.process_group import start_distributed
from mmdevplug.errors import CheckpointError
from mmdevplug.model.place_model import initialize_weights
from mmdevplug.patches.mmengine import restore_mmengine
from mmdevplug.patches.torch_load import safe_loading
from tests.jobs import load_file, needs_safe_loading

_ORIGINAL = torch.load
pytestmark = needs_safe_loading


class Unknown:
    """Not of MMEngine's classes."""


@pytest.fixture
def files(tmp_path):
    found = {name: str(tmp_path / f'{name}.pth') for name in ('plain', 'buffer', 'unknown')}
    torch.save(dict(weight=torch.ones(2)), found['plain'])
    torch.save(dict(log=HistoryBuffer([1.0], [1])), found['buffer'])
    torch.save(dict(what=Unknown()), found['unknown'])
    yield found
    assert torch.load is _ORIGINAL


def test_every_argument_arrives(files):
    with pytest.MonkeyPatch.context() as patch:
        calls = []
        patch.setattr(torch, 'load', lambda *args, **kwargs: calls.append((args, kwargs)))
        with safe_loading('x', forced=False):
            torch.load(f=files['plain'], encoding='latin1', mmap=True)
            torch.load(files['plain'], 'meta', pickle)
            torch.load(files['plain'], weights_only=False)
            torch.load(files['plain'], 'meta', weights_only=True)
        assert torch.load.__name__ == '<lambda>'
    (first, options), *others = calls
    assert first[:1] == (files['plain'],)
    assert options['encoding'] == 'latin1'
    assert options['mmap'] is True
    assert others[0][0] == (files['plain'], 'meta', pickle)
    assert others[1][1] == dict(weights_only=False)
    assert others[2][0][:2] == (files['plain'], 'meta')


def _write_python_2(path):
    """A checkpoint in PyTorch's old format, with a string as Python 2 pickled it.

    It has a byte that is no UTF-8, and is readable with the encoding alone.
    """
    pickled = b'\x80\x02}q\x00X\x04\x00\x00\x00nameq\x01U\x04caf\xe9q\x02s.'
    magic, version = 0x1950A86A20F9469CFC6C, 1001
    with open(path, 'wb') as file:
        for value in (magic, version, dict(little_endian=True)):
            pickle.dump(value, file, protocol=2)
        file.write(pickled)
        pickle.dump([], file, protocol=2)


def test_what_the_caller_asks_for_is_respected_in_a_models_own_code(files):
    with safe_loading('x', forced=False):
        assert isinstance(torch.load(files['unknown'], weights_only=False)['what'], Unknown)
        assert isinstance(torch.load(files['unknown'], 'cpu', pickle)['what'], Unknown)
        assert isinstance(torch.load(files['buffer'], weights_only=True)['log'], HistoryBuffer)
        assert isinstance(torch.load(files['buffer'])['log'], HistoryBuffer)
        with pytest.raises(pickle.UnpicklingError):
            torch.load(files['unknown'], weights_only=True)
        with pytest.raises(pickle.UnpicklingError):
            torch.load(files['unknown'])
    for options in (dict(weights_only=False), dict(pickle_module=pickle)):
        # A block inside of a forced one is forced.
        with pytest.raises(CheckpointError, match=r'unknown\.pth.*Unknown'):
            with safe_loading('x'), safe_loading('x', forced=False):
                torch.load(files['unknown'], **options)


def test_an_error_of_the_models_own_is_left_alone(files):
    with pytest.raises(pickle.UnpicklingError, match='^mine$'):
        with safe_loading('x', forced=False):
            raise pickle.UnpicklingError('mine')


def test_threads_and_contexts_that_overlap(files):
    """The first to begin ends first, and a thread that asked for nothing loads meanwhile."""
    steps = [threading.Event() for _ in range(3)]

    def first():
        with safe_loading('first', forced=False):
            found = torch.load(files['buffer'])
            steps[0].set()
            steps[1].wait(30)
        steps[2].set()
        return found['log']

    def second():
        steps[0].wait(30)
        with safe_loading('second', forced=False):
            steps[1].set()
            steps[2].wait(30)
            return torch.load(files['buffer'])['log']

    def stranger():
        steps[0].wait(30)
        return load_file(files['unknown'])['what']

    found = in_threads(first, second, stranger)
    assert list(map(type, found)) == [HistoryBuffer, HistoryBuffer, Unknown]
    assert torch.load is _ORIGINAL


def in_threads(*functions):
    """What functions return that run at once."""
    with ThreadPoolExecutor(len(functions)) as pool:
        return [each.result(60) for each in [pool.submit(function) for function in functions]]


def test_many_threads_load_at_once(files):
    def load():
        for _ in range(20):
            with safe_loading('x', forced=False):
                assert 'log' in torch.load(files['buffer'])

    def load_unsafe():
        for _ in range(20):
            assert 'what' in _ORIGINAL(files['unknown'], 'cpu', pickle)

    in_threads(*[load_unsafe, load, load] * 2)


def test_classes_that_the_user_allowed_stay_allowed(files):
    known = torch.serialization.get_safe_globals()
    torch.serialization.add_safe_globals([HistoryBuffer, Unknown])
    try:
        with safe_loading('x'):
            assert 'what' in torch.load(files['unknown'])
        assert {HistoryBuffer, Unknown} <= set(torch.serialization.get_safe_globals())
        assert np.ndarray not in torch.serialization.get_safe_globals()
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(known)


def test_registered_schemes_are_safe_until_they_are_restored(files):
    restore_mmengine()  # another test in this process may have left it patched
    before = dict(CheckpointLoader._schemes)

    @CheckpointLoader.register_scheme(prefixes='mine://')
    def load_from_mine(filename, map_location=None):
        return load_file(files[filename[len('mine://') :]], map_location=map_location)

    patch_mmengine('cpu')
    patch_mmengine('cpu')  # as a second runner of a process
    try:
        assert 'log' in CheckpointLoader.load_checkpoint('mine://buffer', 'cpu')
        with pytest.raises(CheckpointError, match='Unknown'):
            CheckpointLoader.load_checkpoint('mine://unknown', 'cpu')
    finally:
        restore_mmengine()
    assert 'what' in CheckpointLoader.load_checkpoint('mine://unknown', 'cpu')
    del CheckpointLoader._schemes['mine://']
    assert CheckpointLoader._schemes == before


def test_a_models_own_initialization(files, tmp_path):
    """As a runner calls it: its loads keep their arguments, in its own threads too."""
    python_2 = tmp_path / 'python2.pth'
    _write_python_2(python_2)

    class Model(nn.Module):
        def init_weights(self):
            self.found = [
                torch.load(str(python_2), encoding='latin1'),
                torch.load(files['unknown'], weights_only=False),
            ]
            raise RuntimeError('from init_weights')

    assert get_accelerator('cpu').device_type == 'cpu'
    model = Model()
    with pytest.raises(RuntimeError, match='from init_weights'):
        initialize_weights(model, start_distributed('none', 'cpu'))
    assert model.found[0] == dict(name='caf\xe9')
    assert torch.load is _ORIGINAL


def test_a_function_put_around_ours_stays():
    with pytest.MonkeyPatch.context() as undo:
        undo.setattr(torch, 'load', _ORIGINAL)
        with safe_loading('x'):
            ours = torch.load
            torch.load = theirs = lambda *args: ours(*args)
        assert torch.load is theirs
        with pytest.raises(FileNotFoundError):
            torch.load('/does/not/exist')


class OnT20:
    """Pickled as a tensor on a card is where ``torch_gcu`` 1.10 was imported."""

    def __init__(self, value):
        self.value = value

    def __reduce__(self):
        rebuild = sys.modules[T20_REBUILD[0]]._rebuild_device_tensor_from_numpy_gcu
        return rebuild, (self.value.numpy(), self.value.dtype, 'xla:5', True)


T20_REBUILD = ('torch_gcu.core.pytorch_override', '_rebuild_device_tensor_from_numpy_gcu')


def test_tensors_of_a_t20_are_read_without_torch_gcu(tmp_path, monkeypatch):
    def rebuild(*_):
        raise AssertionError("the vendor's function would send the tensor to a card")

    rebuild.__module__, rebuild.__qualname__ = T20_REBUILD
    rebuild.__name__ = T20_REBUILD[1]
    with monkeypatch.context() as patch:
        for name in ('torch_gcu', 'torch_gcu.core', T20_REBUILD[0]):
            patch.setitem(sys.modules, name, ModuleType(name))
        setattr(sys.modules[T20_REBUILD[0]], T20_REBUILD[1], rebuild)
        torch.save(dict(weight=OnT20(torch.arange(3.0))), tmp_path / 'of_a_card.pth')
    with safe_loading('of_a_card.pth'):
        weight = torch.load(tmp_path / 'of_a_card.pth')['weight']
    assert weight.device == torch.device('cpu')
    assert weight.requires_grad
    assert weight.tolist() == [0.0, 1.0, 2.0]
