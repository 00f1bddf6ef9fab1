"""Short messages between all ranks of a group of gloo."""

import json
from typing import Any, List

import torch
from torch import distributed as torch_dist


def gather_json(value: object, gloo: 'torch_dist.ProcessGroupGloo', size: int) -> List[Any]:
    """Give every rank the values of all ranks, of what JSON can write, in the order of ranks."""
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    gloo.allgather([lengths], [torch.tensor([text.numel()])]).wait()
    longest = max(int(length) for length in lengths)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: text.numel()] = text
    found = [torch.zeros(longest, dtype=torch.uint8) for _ in range(size)]
    gloo.allgather([found], [padded]).wait()
    pairs = zip(found, lengths)
    return [json.loads(each[: int(length)].numpy().tobytes()) for each, length in pairs]
