"""Find weights of modules, and attributes that share memory with them."""

from typing import Any, Dict, Iterable, Iterator, List, Optional, Set

import torch
from torch import Tensor, nn

from mmdevplug.accelerators import rank_context
from mmdevplug.accelerators.tensor_sums import tensor_sums


def parts_of(module: nn.Module) -> List[nn.Module]:
    """List a module and those in it, which need no hash: mmrazor's compare by value."""
    found: Dict[int, nn.Module] = {}
    todo: List[Any] = [module]
    while todo:
        part = todo.pop()
        if part is not None and id(part) not in found:
            found[id(part)] = part
            todo += part._modules.values()
    return list(found.values())


def weight_sums(module: nn.Module) -> List[str]:
    """Fingerprint parameters and buffers; ``parameter.data.mul_()`` changes no version."""
    return tensor_sums(_weights_of(parts_of(module), True), rank_context().accelerator)


def memory_of(model: nn.Module) -> Set[int]:
    """Name the memory of what ``state_dict()`` of a model has."""
    found = map(_storage_of, _weights_of(parts_of(model), False))
    return {each for each in found if each is not None}


def is_weight(value: object, memory: Set[int]) -> bool:
    """Whether an attribute is a tensor in the memory of a parameter or buffer.

    Layers that normalize their weight begin with such a one, and compute it in each forward pass.
    """
    return isinstance(value, Tensor) and _storage_of(value) in memory


def _weights_of(modules: Iterable[nn.Module], all_buffers: bool) -> Iterator[Tensor]:
    for module in modules:
        left_out = set() if all_buffers else module._non_persistent_buffers_set
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and name not in left_out:
                yield tensor


def _storage_of(tensor: Tensor) -> Optional[int]:
    """Return what is equal for tensors that share memory; None where that cannot be known."""
    lazy = tensor.device.type != 'cpu' and rank_context().accelerator.compilation.lazy
    if lazy or tensor.is_meta or tensor.layout is not torch.strided:
        return None
    has_untyped = hasattr(tensor, 'untyped_storage')  # since PyTorch 2.0
    return (tensor.untyped_storage() if has_untyped else tensor.storage())._cdata
