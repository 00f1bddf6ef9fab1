"""Groups that are left over, as one tensor of bytes that a checkpoint can hold."""

import math
from typing import Any, List, Sequence

import torch
from torch import Tensor

from mmdevplug.samples.deserialize import open_parcel, place_blocks, put_together, read_header
from mmdevplug.samples.flatten import Parts
from mmdevplug.samples.serialize import pack


def pack_groups(groups: Sequence[Any], allow_pickle: bool = False) -> Tensor:
    """Pack groups; see :func:`mmdevplug.samples.gather_samples` for what they may hold."""
    parts = Parts(allow_pickle)
    parts.take(list(groups))
    return pack(parts, large_bytes=math.inf).data


def unpack_groups(packed: Tensor, allow_pickle: bool = False) -> List[Any]:
    """The groups that :func:`pack_groups` packed, in host memory."""
    parcel = open_parcel(packed, read_header(packed), allow_pickle, large_bytes=math.inf)
    (blocks,) = place_blocks([parcel], torch.device('cpu'))
    return put_together(parcel, blocks)
