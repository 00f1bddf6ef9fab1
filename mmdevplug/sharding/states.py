"""Gather and save states of sharded tensors, and shard states that are whole."""

import copy
import os
from typing import Any, Dict, Optional

import torch
from torch import Tensor, distributed as torch_dist, nn

from mmdevplug.errors import CheckpointError

try:
    from torch.distributed.tensor import DTensor, Replicate
    from torch.overrides import TorchFunctionMode as Mode
except ImportError:  # before PyTorch 2.5
    DTensor, Mode = None, object

#: In a checkpoint: the name of the folder beside it. In place of a tensor: its name there.
KEY, SHARD = 'shards', 'shard'


def is_sharded(tensor: object) -> bool:
    """Whether a tensor is spread over ranks."""
    return DTensor is not None and isinstance(tensor, DTensor)


def copy_whole(value: Tensor, into: Tensor) -> Tensor:
    """Copy this rank's part of a whole tensor into a sharded one, and return that."""
    value, mesh = value.detach().to(into.to_local().device, into.dtype), into.device_mesh
    whole = DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)
    with torch.no_grad():
        into.to_local().copy_(whole.redistribute(placements=into.placements).to_local())
    return into


class CopyingWhole(Mode):
    """Let each rank take its part where a whole tensor is copied into a sharded one.

    DTensor's own copies fail where a dimension is smaller than the number of ranks.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function, see above."""
        if func is Tensor.copy_ and is_sharded(args[0]) and not is_sharded(args[1]):
            return copy_whole(args[1].expand(args[0].shape), args[0])
        return func(*args, **(kwargs or {}))


def map_tensors(state: Any, function: Any) -> Any:
    """Replace the tensors in copies of dicts and lists, which keep their classes."""
    if isinstance(state, dict):
        copied = copy.copy(state)  # with the `_metadata` of weights
        copied.update((name, map_tensors(value, function)) for name, value in state.items())
        return copied
    if isinstance(state, list):
        return [map_tensors(value, function) for value in state]
    return function(state) if isinstance(state, Tensor) else state


def shard_optimizer_state(optimizer: Any, state_dict: Dict[str, Any]) -> Dict[str, Any]:
    """Give each rank its part of an optimizer's whole state: a hook of ``load_state_dict``."""
    parameters = [each for group in optimizer.param_groups for each in group['params']]

    def take(value: Any, parameter: Tensor) -> Any:
        of_parameter = is_sharded(parameter) and getattr(value, 'shape', 0) == parameter.shape
        if not of_parameter or is_sharded(value):
            return value
        return copy_whole(value, torch.zeros_like(parameter.detach(), dtype=value.dtype))

    states = dict(state_dict['state'])
    for index, parameter in enumerate(parameters):
        if index in states:
            states[index] = {name: take(v, parameter) for name, v in states[index].items()}
    return dict(state_dict, state=states)


def collect_states(state: Any, folder: Optional[str], part: str) -> Any:
    """Gather the sharded tensors of a nested state in the host memory of rank 0, or write them.

    All ranks call it. Without a ``folder``, rank 0 gets whole tensors, which share memory where
    the sharded ones do, and the others None. With one, each rank writes what it holds, and names
    are in the places of the tensors.
    """
    shards: Dict[Any, Any] = {}

    def collect(value: Any) -> Any:
        if not is_sharded(value):
            return value
        if folder is not None:
            name, dtype = str(len(shards)), str(value.dtype)[len('torch.') :]
            shards[name] = value.detach()
            return {SHARD: name, 'shape': list(value.shape), 'dtype': dtype}
        local = value.to_local()
        # Also of a rank whose part is empty: all ranks gather the same tensors.
        place = local.untyped_storage().data_ptr() or id(value)
        key = place, local.storage_offset(), tuple(value.shape)
        if key not in shards:
            whole = value.detach().full_tensor()
            shards[key] = whole.cpu() if torch_dist.get_rank() == 0 else None
        return shards[key]

    collected = map_tensors(state, collect)
    if folder is not None:
        from torch.distributed import checkpoint

        checkpoint.save(shards, checkpoint_id=f'{folder}/{part}')
    return collected


def read_shards(state: Any, folder: str, like: Optional[Tensor]) -> Any:
    """Put the tensors of a folder back into a state, sharded like a tensor of this job."""
    from torch.distributed import checkpoint, tensor

    shards: Dict[str, Tensor] = {}

    def take(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if SHARD not in value:
            return {name: take(each) for name, each in value.items()}
        shape, dtype = value['shape'], getattr(torch, value['dtype'])
        if like is None:
            return shards.setdefault(value[SHARD], torch.empty(shape, dtype=dtype))
        how = dict(device_mesh=like.device_mesh, placements=like.placements)
        return shards.setdefault(value[SHARD], tensor.empty(shape, dtype=dtype, **how))

    filled = take(state)
    checkpoint.load(shards, checkpoint_id=folder)
    return filled


def attach_shards(checkpoint: Dict[str, Any], path: str, model: nn.Module) -> None:
    """Read the shards of a checkpoint, if it has any, sharded like the parameters of a model."""
    like = next(filter(is_sharded, model.parameters()), None)
    kept = ('state_dict', 'optimizer') if KEY in checkpoint else ()
    for part in filter(checkpoint.__contains__, kept):
        folder = os.path.join(os.path.dirname(path), checkpoint[KEY], part)
        if not os.path.isdir(folder):
            raise CheckpointError(f'{path} needs {folder}, which is not there. Copy it, too.')
        checkpoint[part] = read_shards(checkpoint[part], folder, like)
