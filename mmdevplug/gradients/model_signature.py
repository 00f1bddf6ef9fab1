"""Check once that all ranks have the same model, before their tensors share a message."""

import hashlib
import json
from itertools import zip_longest
from typing import List

from torch import distributed as torch_dist, nn

from mmdevplug.distributed.byte_exchange import gather_json
from mmdevplug.errors import ModelError
from mmdevplug.utils.annotations import AnyGroup


def check_same_model(module: nn.Module, group: AnyGroup = None) -> None:
    """Refuse to train if the ranks' parameters or buffers differ in name, shape or dtype.

    If they are equal, this costs a message of 64 characters. If not, every rank raises an error
    with the first difference of each rank from rank 0.
    """
    if torch_dist.get_world_size(group) == 1:
        return
    signature = []
    named = dict(parameter=module.named_parameters(), buffer=module.named_buffers())
    for kind, tensors in named.items():
        for name, tensor in tensors:
            shape = 'x'.join(map(str, tensor.shape)) or 'scalar'
            frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
            found = f'{shape} {tensor.dtype}{", frozen" if frozen else ""}'
            signature.append([f'{kind} {name}', found])
    digest = hashlib.sha256(json.dumps(signature).encode()).hexdigest()
    if len(set(gather_json(digest, group))) == 1:
        return
    signatures = gather_json(signature, group)
    lines = [
        f'  rank {rank}: {_first_difference(other, signatures[0])}'
        for rank, other in enumerate(signatures)
        if other != signatures[0]
    ]
    raise ModelError(
        f'{type(module).__name__} is not the same on all ranks, compared with rank 0:\n'
        + '\n'.join(lines)
        + '\nBuild it from the same config on all ranks: look for sizes that depend on the rank, '
        'its data or its files, and for parameters that only some ranks freeze.'
    )


def _first_difference(one: List[List[str]], other: List[List[str]]) -> str:
    pairs = zip_longest(one, other, fillvalue=('nothing more', 'none'))
    (name, kind), (other_name, other_kind) = next(pair for pair in pairs if pair[0] != pair[1])
    return f'has {name} ({kind}) where rank 0 has {other_name} ({other_kind})'
