"""Compare which block the ranks are about to gather or to average, before they do."""

import functools
import zlib
from typing import TYPE_CHECKING, Callable, Dict

import torch
from torch import distributed as torch_dist, nn

from mmdevplug.distributed.byte_exchange import gather_json
from mmdevplug.errors import ModelError
from mmdevplug.utils.annotations import AnyGroup

from .written import groups_of

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup


#: Whether the engine of autograd runs, which may call blocks again (activation checkpointing).
in_backward = getattr(torch._C, '_current_graph_task_id', lambda: -1)


class Agreement:
    """Refuse a step in which ranks call different blocks, or have gradients of different weights.

    FSDP2 gathers the weights of a block when it is called, averages those gradients of it that
    there are, and looks at nothing else: blocks of one shape would be mixed without a word, others
    end in an error of gloo or in waiting. One sum of two numbers is sent for each.

    Args:
        model (nn.Module): Sharded.
        blocks (dict[str, nn.Module]): The sharded modules by name; ``''`` is the model.
        group (ProcessGroup): The ranks that share the weights; it takes tensors of the host.
    """

    def __init__(self, model: nn.Module, blocks: Dict[str, nn.Module], group: AnyGroup) -> None:
        self._group = group
        self._names = {id(p): name for name, p in model.named_parameters()}
        for name, block in blocks.items():
            hook = functools.partial(self._compare_call, f'at {name or "the model"}')
            block.register_forward_pre_hook(hook, prepend=True)
            for each in groups_of(block):
                place = f'after the backward pass of {name or "the model"}'
                vars(each)['post_backward'] = functools.partial(
                    self._compare_gradients, place, each, each.post_backward
                )

    def end_step(self) -> None:
        """Note that this rank has ended its step; all ranks call it."""
        self._compare('at the end of its step')

    def _compare_call(self, place: str, *_: object) -> None:
        if in_backward() == -1:
            self._compare(place)

    def _compare_gradients(
        self, place: str, group: 'FSDPParamGroup', average: Callable[[], None], *_: object
    ) -> None:
        weights = [(each, getattr(each, '_unsharded_param', None)) for each in group.fsdp_params]
        without = [
            self._names[id(each.sharded_param)]
            for each, weight in weights
            if weight is not None and weight.requires_grad
            if weight.grad is None and each.unsharded_accumulated_grad is None
        ]
        if len(without) < sum(each.sharded_param.requires_grad for each, _ in weights):
            place += f', without gradients of {", ".join(without)}' * bool(without)
        else:
            place += ', without any gradient'
        self._compare(place)
        average()

    def _compare(self, place: str) -> None:
        number = zlib.crc32(place.encode())
        both = torch.tensor([number, -number])
        torch_dist.all_reduce(both, torch_dist.ReduceOp.MAX, group=self._group)
        if both[0] == -both[1]:
            return
        places = [text[:300] for text in gather_json(place, self._group)]
        told = '; '.join(f'rank {rank} is {text}' for rank, text in enumerate(places))
        raise ModelError(
            f'sharding gathers the weights of a block when all ranks call it, and averages '
            f'gradients that all ranks have; and they are at different places: {told}. Let no '
            f'sample choose the blocks of the model, or how often they are called; or call the '
            f'others with no effect (add 0 * the sum of their outputs); or train without sharding.'
        )
