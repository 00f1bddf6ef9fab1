"""Serialize samples into one buffer: a header in msgpack, then tensors packed by dtype.

    length of the header (8 bytes) | header | padding | all blocks of one dtype | padding | ...

Large tensors are not in it. They are sent separately, without a copy, in the order of the samples.
"""

from functools import lru_cache
from itertools import accumulate
from typing import Dict, List, NamedTuple, Sequence, Tuple, Union

import msgpack
import numpy as np
import torch
from torch import Tensor

from mmdevplug.accelerators import to_device
from mmdevplug.distributed.byte_exchange import to_tensor
from mmdevplug.utils.torch_compat import view_as_dtype

from .flatten import FlatSamples

VERSION = 1
#: Blocks of one dtype start at multiples of this, so that any dtype can be read there.
ALIGNMENT = 64
#: Tensors from this size on are large: two copies of them take longer than another message.
LARGE_BYTES = 256 << 10


class SerializedSamples(NamedTuple):
    """Samples to send: the buffer and the large tensors, as uint8 tensors on the host."""

    data: Tensor
    large: List[Tensor]

    @property
    def more(self) -> int:
        """The bytes of large tensors."""
        return sum(tensor.numel() for tensor in self.large)


def serialize(parts: FlatSamples, large_bytes: float = LARGE_BYTES) -> SerializedSamples:
    """Serialize samples; tensors of ``large_bytes`` and more stay separate."""
    by_dtype: Dict[torch.dtype, List[Tensor]] = {}
    large: List[Tensor] = []
    for block, tensor in zip(parts.blocks, _on_host(parts.blocks)):
        if isinstance(block, Tensor) and tensor.numel() * tensor.element_size() >= large_bytes:
            large.append(bytes_of(tensor.contiguous()))
        else:
            by_dtype.setdefault(tensor.dtype, []).append(tensor.reshape(-1))
    header = msgpack.packb(
        [VERSION, list(parts.structures), list(parts.shapes), parts.kinds, parts.values],
        unicode_errors='surrogatepass',
    )
    begin = aligned(8 + len(header))
    sizes = [sum([each.numel() for each in group]) for group in by_dtype.values()]
    places = places_of(begin, list(zip(by_dtype, sizes)))
    buffer = torch.empty(places[-1], dtype=torch.uint8)
    buffer[: 8 + len(header)] = to_tensor(len(header).to_bytes(8, 'little') + header)
    buffer[8 + len(header) : begin] = 0
    for (dtype, group), place, size in zip(by_dtype.items(), places, sizes):
        if size:
            end = place + size * itemsize(dtype)
            torch.cat(group, out=view_as_dtype(buffer[place:end], dtype))
            buffer[end : aligned(end)] = 0
    return SerializedSamples(buffer, large)


def serialize_error(message: str) -> SerializedSamples:
    """Serialize the reason why there are no samples."""
    header = msgpack.packb([VERSION, message], unicode_errors='surrogatepass')
    return SerializedSamples(to_tensor(len(header).to_bytes(8, 'little') + header), [])


def _on_host(blocks: Sequence[Union[Tensor, np.ndarray]]) -> List[Tensor]:
    tensors = [
        to_tensor(block.tobytes()) if isinstance(block, np.ndarray) else block for block in blocks
    ]
    # One call, and so one execution on a lazy device.
    return to_device(tensors, 'cpu')


def bytes_of(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, as uint8."""
    return view_as_dtype(tensor.view(-1), torch.uint8)


def places_of(begin: int, totals: Sequence[Tuple[torch.dtype, int]]) -> List[int]:
    """The start of the blocks of each dtype, and the end of the last."""
    sizes = [aligned(total * itemsize(dtype)) for dtype, total in totals]
    return list(accumulate([begin, *sizes]))


def aligned(size: int) -> int:
    """Round up to the next place at which blocks may start."""
    return -(-size // ALIGNMENT) * ALIGNMENT


@lru_cache(maxsize=None)
def itemsize(dtype: torch.dtype) -> int:
    """Bytes of an element."""
    return torch.empty(0, dtype=dtype).element_size()
