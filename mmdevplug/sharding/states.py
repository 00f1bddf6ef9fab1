"""Gather and save states of sharded tensors, and shard states that are whole."""

import copy
import os
from contextlib import suppress
from typing import Any, Callable, Dict, Optional, Tuple

import torch
from torch import Tensor, distributed as torch_dist, nn
from torch.optim import Optimizer

from mmdevplug.errors import CheckpointError
from mmdevplug.utils.annotations import Checkpoint, StateDict
from mmdevplug.utils.pytree import replace_parts
from mmdevplug.utils.shard_index import reader_of_shards

DTensor: Any = None
Mode: Any = object
with suppress(ImportError):  # before PyTorch 2.5
    from torch.distributed.tensor import DTensor, distribute_tensor
    from torch.overrides import TorchFunctionMode as Mode

#: In place of a tensor that is in a folder: its name there.
SHARD = 'shard'


def is_sharded(tensor: object) -> bool:
    """Whether a tensor is spread over ranks."""
    return DTensor is not None and isinstance(tensor, DTensor)


def shard_alike(value: Tensor, like: Any) -> 'DTensor':
    """Shard a tensor that this rank has as another is, without messages."""
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


class CopyingWhole(Mode):
    """Let each rank take its part where a whole tensor is copied into a sharded one.

    DTensor's own copies fail where a dimension is smaller than the number of ranks.
    """

    def __torch_function__(
        self, func: Callable, types: object, args: Tuple = (), kwargs: Optional[dict] = None
    ) -> object:
        """Call a function, see above."""
        if func is Tensor.copy_ and is_sharded(args[0]) and not is_sharded(args[1]):
            args = (args[0], shard_alike(args[1].detach().expand(args[0].shape), args[0]))
        return func(*args, **(kwargs or {}))


def shard_optimizer_state(optimizer: Optimizer, state_dict: Checkpoint) -> StateDict:
    """Give each rank its part of an optimizer's whole state: a hook of ``load_state_dict``."""
    parameters = [each for group in optimizer.param_groups for each in group['params']]

    def take(value: Any, parameter: Tensor) -> object:
        if is_sharded(value) or getattr(value, 'shape', 0) != parameter.shape:
            return value
        return torch.empty_like(parameter.detach()).copy_(shard_alike(value, parameter))

    states = {
        index: {name: take(value, parameters[index]) for name, value in state.items()}
        for index, state in state_dict['state'].items()
    }
    return dict(state_dict, state=states)


def copy_shards(model: nn.Module, _: object = None) -> nn.Module:
    """Copy modules and this rank's part of their weights, to average and to save: ``deepcopy``."""
    copies = {part: object.__new__(type(part)) for part in model.modules()}
    made: Dict[int, object] = {id(part): copied for part, copied in copies.items()}
    for part, copied in copies.items():
        names = ('_parameters', '_buffers', '_modules')
        own = copy.deepcopy({name: vars(part)[name] for name in names}, made)
        vars(copied).update(vars(part), **own, _state_dict_hooks=part._state_dict_hooks.copy())

    def gather(_: nn.Module, state: StateDict, prefix: str, __: object) -> None:
        if prefix:  # as a part of what a hook saves
            state.update(collect_states(state, None, ''))

    copies[model].register_state_dict_post_hook(gather)
    return copies[model]


def collect_states(state: object, folder: Optional[str], part: str) -> Any:
    """Gather the sharded tensors of a nested state in the host memory of rank 0, or write them.

    All ranks call it. Without a ``folder``, rank 0 gets whole tensors, which share memory where
    the sharded ones do, and the others None. With one, each rank writes what it holds, and names
    are in the places of the tensors.
    """
    shards: Dict[object, object] = {}

    def collect(value: Any) -> Any:
        if not is_sharded(value):
            return value
        if folder is not None:
            name = str(len(shards))
            shards[name] = value.detach()
            return {SHARD: name, 'shape': tuple(value.shape), 'dtype': value.dtype}
        local = value.to_local()
        # Also of a rank whose part is empty: all ranks gather the same tensors.
        key = local.untyped_storage()._cdata, local.storage_offset(), tuple(value.shape)
        if key not in shards:
            whole = value.detach().full_tensor()
            shards[key] = whole.cpu() if torch_dist.get_rank() == 0 else None
        return shards[key]

    collected: Any = replace_parts(state, collect)
    if hasattr(state, '_metadata'):  # of weights
        collected._metadata = state._metadata
    if folder is not None:
        from torch.distributed import checkpoint

        checkpoint.save(shards, checkpoint_id=f'{folder}/{part}')
    return collected


def attach_shards(states: StateDict, folder: str, model: nn.Module) -> None:
    """Read the tensors of a checkpoint from its folder, sharded like the parameters of a model."""
    from torch.distributed import checkpoint

    like = next(filter(is_sharded, model.parameters()), None)
    shards: Dict[str, Tensor] = {}

    def take(value: object) -> object:
        if not isinstance(value, dict):
            return value
        if SHARD not in value:
            return {name: take(each) for name, each in value.items()}
        empty = torch.empty(value['shape'], dtype=value['dtype'], device='meta')
        empty = empty if like is None else shard_alike(empty, like)
        place = 'cpu' if like is None else like.device
        return shards.setdefault(value[SHARD], torch.empty_like(empty, device=place))

    if not os.path.isdir(folder):
        raise CheckpointError(f'the checkpoint needs {folder}, which is not there. Copy it, too.')
    for part in filter(states.__contains__, ('state_dict', 'optimizer')):
        shards.clear()
        states[part] = take(states[part])
        reader = reader_of_shards(os.path.join(folder, part))
        reader.read_metadata()  # PyTorch hides its errors in those of the collective that follows
        checkpoint.load(shards, storage_reader=reader)
