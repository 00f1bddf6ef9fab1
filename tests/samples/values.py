"""Samples of every kind for property tests, and what makes two of them equal to the last bit."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from mmengine.structures import BaseDataElement, InstanceData

from mmdevplug.utils.torch_compat import view_as_dtype

Answer = namedtuple('Answer', 'text score')


@dataclass(frozen=True)
class Rollout:
    prompt: str
    tokens: Any


@dataclass
class Image:
    pixels: Any
    label: int = 0

    def __post_init__(self):
        raise AssertionError('nothing of the sender may be run')


class Detections(InstanceData):
    pass


DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.complex64,
    torch.complex128,
]
if hasattr(torch, 'float8_e4m3fn'):
    DTYPES.append(torch.float8_e4m3fn)

shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
seeds = st.integers(0, 2**31)


def make_tensor(dtype, shape, seed, strided=False):
    """Any bits, also those of NaN; a bool has 0 and 1 alone."""
    if strided:
        shape = (*shape, 2)
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        made = torch.rand(shape, generator=generator) < 0.5
    else:
        size = torch.empty(shape, dtype=dtype).numel() * torch.empty(0, dtype=dtype).element_size()
        data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
        made = view_as_dtype(data, dtype).view(shape)
    return made[..., 0] if strided else made


def tensors_of(dtype):
    return st.builds(make_tensor, st.just(dtype), shapes, seeds, st.booleans())


def make_array(text, shape, seed):
    random = np.random.RandomState(seed % 2**32)
    dtype = np.dtype(text)
    if dtype.kind == 'U':
        return random.randint(0, 999, shape).astype(dtype)
    size = int(np.prod(shape)) * dtype.itemsize
    return np.frombuffer(random.bytes(size), dtype).reshape(shape).copy()


arrays = st.sampled_from(['<f4', '>f8', '<i2', '<u8', '<c8', '<U3', '<M8[s]'])
plain = [
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.complex_numbers(),
    st.booleans(),
    st.text(st.characters(), max_size=5),  # surrogates too
    st.binary(max_size=5),
    st.none(),
    st.builds(np.float32, st.floats(width=32)),
    st.builds(np.int8, st.integers(-128, 127)),
    st.builds(np.str_, st.text(max_size=3)),
    st.builds(np.bytes_, st.binary(max_size=3)),
    st.lists(st.integers(), max_size=4),
]
mixed_lists = st.lists(st.one_of(st.integers(-9, 9), st.floats(), st.text(max_size=3)), max_size=4)
keys = st.one_of(
    st.text(max_size=3), st.integers(-5, 5), st.booleans(), st.tuples(st.integers(), st.text())
)


def make_image(pixels, label):
    made = object.__new__(Image)
    made.pixels, made.label = pixels, label
    return made


def make_detections(boxes, parts):
    made = Detections(metainfo=dict(shape=(3, 4)))
    made.boxes = boxes
    made.set_field(parts, 'parts', field_type='metainfo')
    return made


def make_element(first, second):
    made = BaseDataElement(metainfo=dict(info=second))
    made.first = first
    return made


def _containers(kinds):
    """Kinds of samples that consist of samples of other kinds."""
    return st.one_of(
        kinds.map(lambda kind: st.lists(kind, max_size=3)),
        st.lists(kinds, max_size=3).map(lambda parts: st.tuples(*parts)),
        st.dictionaries(keys, kinds, max_size=3).map(st.fixed_dictionaries),
        st.dictionaries(keys, kinds, max_size=2).map(
            lambda parts: st.fixed_dictionaries(parts).map(OrderedDict)
        ),
        st.tuples(kinds, kinds).map(lambda parts: st.builds(Answer, *parts)),
        kinds.map(lambda kind: st.builds(Rollout, st.text(max_size=3), kind)),
        kinds.map(lambda kind: st.builds(make_image, kind, st.integers(0, 9))),
        kinds.map(
            lambda kind: st.builds(
                make_detections, st.builds(lambda n: torch.zeros(n, 4), st.integers(0, 3)), kind
            )
        ),
        st.tuples(kinds, kinds).map(lambda parts: st.builds(make_element, *parts)),
    )


leaf_kinds = st.one_of(
    st.sampled_from(DTYPES).map(tensors_of),
    arrays.map(lambda text: st.builds(make_array, st.just(text), shapes, seeds)),
    st.sampled_from(plain),
)
#: Strategies of samples: all that one of them makes have the same structure.
kinds = st.recursive(leaf_kinds, _containers, max_leaves=6)


@st.composite
def pools(draw, world_size, most=4, same_kind=True):
    """For each rank a list of samples, also of length 0; all of the same kind, or of any."""
    kind = draw(kinds) if same_kind else st.one_of(mixed_lists, kinds.flatmap(lambda kind: kind))
    return [draw(st.lists(kind, max_size=most)) for _ in range(world_size)]


def bits(value):
    """Equal for two values if and only if structure, types and all bits are."""
    if isinstance(value, torch.Tensor):
        data = torch.empty(value.shape, dtype=value.dtype).copy_(value.detach().cpu())
        data = view_as_dtype(data.view(-1), torch.uint8) if data.numel() else torch.empty(0)
        return ('tensor', str(value.dtype), tuple(value.shape), data.view(-1).numpy().tobytes())
    if isinstance(value, (np.str_, np.bytes_)):
        return (type(value).__name__, value.item())  # to NumPy, zeros at the end are nothing
    if isinstance(value, (np.ndarray, np.generic)):
        return (type(value).__name__, value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, BaseDataElement):
        return (
            type(value).__name__,
            *((name, bits(getattr(value, name))) for name in sorted(value._data_fields)),
            'metainfo',
            *((name, bits(getattr(value, name))) for name in sorted(value._metainfo_fields)),
        )
    if isinstance(value, dict):
        pairs = [(type(k).__name__, repr(k), bits(v)) for k, v in value.items()]
        return (type(value).__name__, *pairs)
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, *map(bits, value))
    if isinstance(value, (Rollout, Image)):
        return (type(value).__name__, *(bits(getattr(value, f.name)) for f in fields(value)))
    if isinstance(value, (float, complex)):
        return (type(value).__name__, np.array(value).tobytes())
    return (type(value).__name__, repr(value))
