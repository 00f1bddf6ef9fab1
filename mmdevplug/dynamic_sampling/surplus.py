"""Store left-over groups as one tensor of bytes that a checkpoint can hold."""

import math
from typing import Any, List, Sequence

import torch
from torch import Tensor

from mmdevplug.samples.deserialize import deserialize, move_blocks, read_header, rebuild_samples
from mmdevplug.samples.flatten import FlatSamples
from mmdevplug.samples.serialize import serialize


def pack_groups(groups: Sequence[Any], allow_pickle: bool = False) -> Tensor:
    """Pack groups; see :func:`mmdevplug.samples.gather_samples` for what they may hold."""
    parts = FlatSamples(allow_pickle)
    parts.take(list(groups))
    return serialize(parts, large_bytes=math.inf).data


def unpack_groups(packed: Tensor, allow_pickle: bool = False) -> List[Any]:
    """The groups that :func:`pack_groups` packed, in host memory."""
    received = deserialize(packed, read_header(packed), allow_pickle, large_bytes=math.inf)
    (blocks,) = move_blocks([received], torch.device('cpu'))
    return rebuild_samples(received, blocks)
