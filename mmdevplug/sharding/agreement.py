"""Compare which block the ranks are about to gather, before they do."""

from typing import Any, List

import torch
from torch import distributed as torch_dist, nn

from mmdevplug.distributed.byte_exchange import gather_json
from mmdevplug.errors import ModelError
from mmdevplug.utils.annotations import AnyGroup

#: Whether the engine of autograd runs, which may call blocks again (activation checkpointing).
_in_backward = getattr(torch._C, '_current_graph_task_id', lambda: -1)


class Agreement:
    """Refuse a step in which ranks call different blocks, or a block different numbers of times.

    FSDP2 gathers the weights of a block when it is called, and looks at nothing else: blocks of
    one shape would be mixed without a word, others end in an error of gloo or in waiting. One sum
    of two numbers is sent for each block.

    Args:
        model (nn.Module): Sharded.
        blocks (list[str]): Names of the sharded blocks; ``''`` is the model.
        group (ProcessGroup): The ranks that share the weights; it takes tensors of the host.
    """

    def __init__(self, model: nn.Module, blocks: List[str], group: AnyGroup) -> None:
        self._names, self._group = blocks, group
        modules = dict(model.named_modules())
        for number, name in enumerate(blocks):
            hook: Any = lambda *_, number=number: self._compare(number)  # noqa: E731
            modules[name].register_forward_pre_hook(hook, prepend=True)

    def end_step(self) -> None:
        """Note that this rank has ended its step; all ranks call it."""
        self._compare(len(self._names))

    def _compare(self, number: int) -> None:
        if _in_backward() != -1:
            return
        both = torch.tensor([number, -number])
        torch_dist.all_reduce(both, torch_dist.ReduceOp.MAX, group=self._group)
        if both[0] == -both[1]:
            return
        here = [*self._names, None][number]
        places = [
            'at the end of its step' if name is None else f'at {name or "the model"}'
            for name in gather_json(here, self._group)
        ]
        told = '; '.join(f'rank {rank} is {place}' for rank, place in enumerate(places))
        raise ModelError(
            f'sharding gathers the weights of a block when all ranks call it, and they are at '
            f'different ones: {told}. Let no sample choose the blocks of the model, or how often '
            f'they are called; or call the others with no effect; or train without sharding.'
        )
