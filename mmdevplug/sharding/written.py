"""Keep what a model writes into weights while they are gathered, and hooks on its hidden outputs.

FSDP2 frees gathered weights after the module that holds them was called, with what was written;
and it gathers them for the backward pass by hooks on the outputs that it finds.
"""

from typing import TYPE_CHECKING, Any, Dict, List, Set, Tuple

import torch
from torch import Tensor, nn

from mmdevplug.errors import ModelError
from mmdevplug.utils.pytree import tensors_in

from .states import CopyingWhole, shard_alike

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup


def groups_of(module: Any) -> List['FSDPParamGroup']:
    """The groups of parameters that FSDP2 gathers when this module is called."""
    state: Any = module._get_fsdp_state()
    groups = getattr(state, '_fsdp_param_groups', [state._fsdp_param_group])  # since PyTorch 2.12
    return [group for group in groups if group is not None]


class WrittenWeights:
    """Put what a step writes into gathered weights into their parts, and refuse what is lost.

    ``p.mul_()`` counts a version and ``p.data = …`` replaces memory. What ``p.data.mul_()`` writes
    is found by its values in a first step, and looked for in those weights from then on.

    Args:
        model (nn.Module): Sharded.
        blocks (dict[str, nn.Module]): The sharded modules by name, with the model.
    """

    def __init__(self, model: nn.Module, blocks: Dict[str, nn.Module]) -> None:
        self._model = model
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._held: Dict[nn.Module, List[Tuple[Any, Tensor, int]]] = {}
        self._storages: Dict[str, int] = {}
        self._compared: Set[bool] = set()  # whether in training and in evaluation
        self._changing: Set[int] = set()
        for block in blocks.values():
            block.register_forward_pre_hook(self._remember)
            block.register_forward_hook(self._keep, prepend=True)

    def check(self) -> None:
        """Refuse weights whose ``data`` was assigned while they were in parts.

        Raises:
            ModelError: With the name of the first.
        """
        found = {name: p.untyped_storage()._cdata for name, p in self._model.named_parameters()}
        self._storages = self._storages or found
        if self._held:
            self._compared.add(self._model.training)
        lost = next(
            (n for n, place in found.items() if self._storages.get(n, place) != place), None
        )
        if lost is not None:
            raise ModelError(
                f'sharding: a tensor was assigned to the .data of {lost}, as by `p.data = ...` or '
                f'vector_to_parameters(), while each rank holds a part of it: it would be lost. '
                f'Write into it: with torch.no_grad(): p.mul_(m).add_(q, alpha=1 - m), or '
                f'p.copy_(...); or train without sharding.'
            )

    def _remember(self, block: nn.Module, _: object) -> None:
        gathered = [each for group in groups_of(block) for each in group.fsdp_params]
        weights = [(each, each.unsharded_param) for each in gathered]
        self._held[block] = [(each, weight.data, weight._version) for each, weight in weights]

    @torch.no_grad()
    def _keep(self, block: nn.Module, _: object, __: object) -> None:
        for each, held, version in self._held[block]:
            weight, part = each.unsharded_param, each.sharded_param
            replaced = weight.data_ptr() != held.data_ptr()
            known = self._model.training in self._compared
            looked_at = id(part) in self._changing or not known
            if not (replaced or weight._version != version or looked_at):
                continue
            own, local = shard_alike(weight.detach(), part).to_local(), part.to_local()
            if own.equal(local.to(own)):
                continue
            self._changing.add(id(part))
            if weight.dtype != part.dtype:
                raise ModelError(
                    f'sharding.mixed_precision: {self._names[id(part)]} is written to while it is '
                    f'gathered in {weight.dtype}, which would round it. Write to it outside of '
                    f'{type(block).__name__}.forward, or leave mixed_precision out.'
                )
            with CopyingWhole():
                part.copy_(weight.detach())
            if replaced:
                weight.data = held  # into which it is gathered


def gather_for_backward(block: Any) -> None:
    """Gather the weights of a block for backward where FSDP2 does not see its outputs.

    These are tensors inside of objects, and views: a hook of a view is lost when it is written to.
    """
    state: Any = block._get_fsdp_state()

    def hook(_: nn.Module, __: object, output: object) -> None:
        for tensor in _tensors(output):
            seen = tensor if tensor._base is None else tensor._base
            if seen.requires_grad:
                seen.register_hook(state._pre_backward)

    block.register_forward_hook(hook, prepend=True)


def _tensors(output: object) -> List[Tensor]:
    """The tensors of an output that need gradients, also in attributes of its objects."""
    if not torch.is_grad_enabled():
        return []
    if isinstance(output, (list, tuple)):
        return [tensor for each in output for tensor in _tensors(each)]
    found = tensors_in(output)
    if not found and hasattr(output, '__dict__') and not isinstance(output, nn.Module):
        found = tensors_in(vars(output))
    return [tensor for tensor in found if tensor.requires_grad]
