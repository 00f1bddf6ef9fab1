"""A state that was saved and loaded is equal, deeply and by type, to the one before."""

import collections
from functools import partial
from typing import Any, Callable, Dict, NamedTuple

import numpy as np
import pytest
import torch
from mmengine.config import ConfigDict
from mmengine.logging import HistoryBuffer
from mmengine.optim import OneCycleLR
from torch import nn

from mmdevplug.accelerators import get_accelerator
from mmdevplug.checkpoint.host_copy import copy_to_host
from mmdevplug.checkpoint.reading import read_checkpoint
from mmdevplug.checkpoint.writing import write_checkpoint
from mmdevplug.patches import torch_load as reading
from mmdevplug.patches.torch_load import trust_classes
from tests.jobs import load_file, torch_before


class Point(NamedTuple):
    x: Any
    y: Any


def _views():
    base = torch.arange(12.0)
    return [base, base[2:8:2], base.view(3, 4).t(), base[:0]]


def _quantized():
    scales, zeros = torch.tensor([0.1, 0.2]), torch.tensor([0, 3])
    return [
        torch.quantize_per_tensor(torch.rand(3, 2), 0.1, 10, torch.quint8),
        torch.quantize_per_channel(torch.rand(2, 3), scales, zeros, 0, torch.qint8),
    ]


def _model_state():
    state = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).state_dict()
    assert state._metadata
    return state


def _history():
    buffer = HistoryBuffer([1.0, 2.5], [1, 2])
    buffer.update(3)
    return buffer


def _one_cycle(strategy):
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1, momentum=0.9)
    options = dict(eta_max=0.2, total_steps=9, anneal_strategy=strategy)
    return OneCycleLR(optimizer, **options).state_dict()


def _shared_list():
    inner = [torch.ones(2)]
    return dict(a=inner, b=inner)


NUMPY_DTYPES = '?bhilBHILefdFD'

#: What makes a state, by name.
STATES: Dict[str, Callable[[], Any]] = dict(
    plain=lambda: dict(a=1, b=[2.5, None, True], c=('x', b'y', 3 + 4j), d={5, 6}, e=2**80),
    frozen=lambda: [frozenset([1, 2]), bytearray(b'abc'), range(2, 9, 3), slice(1, None, 2)],
    types=lambda: dict(a=int, b=float, c=dict),
    counter=lambda: collections.Counter({60: 1, 80: 2}),
    ordered=lambda: collections.OrderedDict(b=torch.rand(2), a=1),
    default=lambda: collections.defaultdict(list, a=[torch.rand(2)], b=[]),
    nested_default=lambda: collections.defaultdict(dict, {3: dict(step=torch.tensor(2.0))}),
    deque=lambda: collections.deque([1, torch.rand(2)], maxlen=3),
    endless_deque=lambda: collections.deque([dict(a=1)]),
    named=lambda: Point(torch.rand(2), dict(a=Point(1, 2))),
    config=lambda: ConfigDict(a=dict(b=[1, dict(c=torch.rand(2))]), keys=3),
    numpy_arrays=lambda: [np.arange(6).reshape(2, 3).astype(kind) for kind in NUMPY_DTYPES],
    numpy_scalars=lambda: [np.dtype(kind).type(1) for kind in NUMPY_DTYPES],
    numpy_texts=lambda: [np.array(['person', 'car']), np.str_('x'), np.array([b'a', b'bc'])],
    numpy_dtypes=lambda: [np.dtype(kind) for kind in NUMPY_DTYPES],
    fortran=lambda: np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    torch_values=lambda: [torch.float16, torch.Size([2, 3]), torch.device('cpu'), torch.bfloat16],
    sparse=lambda: torch.eye(3).to_sparse(),
    quantized=_quantized,
    complex=lambda: [torch.rand(3, dtype=torch.complex64), torch.rand(2, 2).cdouble()],
    conjugated=lambda: (lambda x: [x, x.conj(), torch.rand(3)._neg_view()])(
        torch.rand(3).cfloat() * 1j
    ),
    views=_views,
    expanded=lambda: torch.rand(3, 1).expand(3, 4),
    channels_last=lambda: torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
    small=lambda: [torch.tensor(3), torch.zeros(0, 4), torch.tensor(True), torch.rand(2).half()],
    parameters=lambda: [nn.Parameter(torch.rand(2)), nn.Parameter(torch.rand(2), False)],
    leaf=lambda: torch.rand(2, requires_grad=True),
    shared=_shared_list,
    model=_model_state,
    history=_history,
    one_cycle_cos=lambda: _one_cycle('cos'),
    one_cycle_linear=lambda: _one_cycle('linear'),
)


def _dense(tensor):
    if tensor.is_quantized:
        return tensor.dequantize()
    # Strided tensors have `to_dense` from PyTorch 1.11 on.
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


def _states_to_save():
    made = {name: make() for name, make in STATES.items()}
    if torch_before('2.0.0'):
        # `torch.save` writes the memory of such a view, and not that its values are conjugated.
        del made['conjugated']
    return made


def check_equal(one, other, where='state'):
    """Compare values and types, and of tensors all that a reader could notice."""
    assert type(one) is type(other), where
    if isinstance(one, torch.Tensor):
        for name in ('dtype', 'layout', 'shape', 'requires_grad', 'device'):
            assert getattr(one, name) == getattr(other, name), (where, name)
        if one.is_quantized:
            assert one.qscheme() == other.qscheme(), where
        elif one.layout == torch.strided:
            assert one.stride() == other.stride(), where
        with torch.no_grad():
            assert torch.equal(_dense(one), _dense(other)), where
    elif isinstance(one, dict):
        assert list(dict.keys(one)) == list(dict.keys(other)), where
        for key in dict.keys(one):
            check_equal(dict.__getitem__(one, key), dict.__getitem__(other, key), (where, key))
        check_equal(
            getattr(one, 'default_factory', None), getattr(other, 'default_factory', None), where
        )
        if type(one) is collections.OrderedDict:
            check_equal(vars(one), vars(other), (where, 'attributes'))
    elif isinstance(one, (list, tuple, collections.deque)):
        assert len(one) == len(other), where
        for index, pair in enumerate(zip(one, other)):
            check_equal(*pair, (where, index))
        assert getattr(one, 'maxlen', None) == getattr(other, 'maxlen', None), where
    elif isinstance(one, (np.ndarray, np.generic)):
        assert (one.dtype, one.shape) == (other.dtype, other.shape), where
        assert one.tobytes() == other.tobytes(), where
        assert one.flags.f_contiguous == other.flags.f_contiguous, where
    elif isinstance(one, HistoryBuffer):
        ours, theirs = vars(one), vars(other)
        for name in ('_log_history', '_count_history', 'max_length'):
            check_equal(ours[name], theirs[name], (where, name))
        assert one.statistics('mean') == other.statistics('mean')
    else:
        assert one == other, where


@pytest.fixture
def trusted(monkeypatch):
    monkeypatch.setattr(reading, '_trusted', [])
    trust_classes([f'{__name__}.Point'])


@pytest.mark.parametrize('keep', [False, True], ids=['as it is', 'kept'])
def test_what_was_saved_is_what_is_loaded(tmp_path, trusted, keep):
    states = _states_to_save()
    path = str(tmp_path / 'a.pth')
    write_checkpoint(copy_to_host(states, get_accelerator('cpu'), keep), path)
    loaded = read_checkpoint(path)
    for name in states:
        check_equal(states[name], loaded[name], name)
    assert loaded['shared']['a'] is loaded['shared']['b']
    # Views of one memory are still that: a write to one is seen in the other.
    base, part = loaded['views'][:2]
    base[2] = 77.0
    assert part[0] == 77.0


@pytest.mark.parametrize('keep', [False, True])
def test_every_further_copy_is_equal_too(keep):
    """A second checkpoint of the same state, and a state that was loaded and is saved again."""
    states = {name: make() for name, make in STATES.items()}
    copier = partial(copy_to_host, accelerator=get_accelerator('cpu'), keep=keep)
    check_equal(states, copier(states))
    check_equal(states, copier(copier(states)))
    states['views'][0].add_(1)
    check_equal(states, copier(states))


@pytest.mark.parametrize('sizes', [(8, 2), (2, 8)])
def test_storages_of_several_sizes_at_one_address(sizes):
    buffer = np.arange(8.0)
    states = [torch.from_numpy(buffer[:size]) for size in sizes]
    copied = copy_to_host(states, get_accelerator('cpu'), keep=True)
    buffer += 1
    assert [tensor.tolist() for tensor in copied] == [list(range(size)) for size in sizes]


def test_stock_pytorch_reads_it(tmp_path):
    states = _states_to_save()
    path = str(tmp_path / 'a.pth')
    write_checkpoint(copy_to_host(states, get_accelerator('cpu')), path)
    check_equal(states, load_file(path))
