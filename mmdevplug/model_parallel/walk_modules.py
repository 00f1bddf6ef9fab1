"""Walk through the modules and tensors of a model by their names."""

from functools import lru_cache
from typing import Any, Container, Dict, Iterable, List, Optional, Tuple

from torch import Tensor, nn


def all_modules(model: nn.Module) -> List[Tuple[str, nn.Module]]:
    """Every name of every module, in order of registration; PyTorch's own walk is slow."""
    found: List[Tuple[str, nn.Module]] = []
    left = [('', model)]
    while left:
        name, module = left.pop()
        found.append((name, module))
        if module._modules:
            prefix = f'{name}.' if name else ''
            for key, child in reversed(module._modules.items()):
                if child is not None:
                    left.append((prefix + key, child))
    return found


def named_tensors(model: nn.Module) -> List[Tuple[str, Tensor]]:
    """Every name of every parameter and buffer, also of those that occur more than once."""
    found: List[Tuple[str, Tensor]] = []
    for module_name, module in all_modules(model):
        prefix = f'{module_name}.' if module_name else ''
        for place in (module._parameters, module._buffers):
            for name, tensor in place.items():
                if tensor is not None:
                    found.append((prefix + name, tensor))
    return found


def tied_names(tensors: Iterable[Tuple[str, Tensor]]) -> List[List[str]]:
    """All names of each tensor that has several."""
    names: Dict[int, List[str]] = {}
    for name, tensor in tensors:
        names.setdefault(id(tensor), []).append(name)
    return [tied for tied in names.values() if len(tied) > 1]


def class_or_own(module: nn.Module, name: str) -> Any:
    """An attribute that a class or its instance may have; ``getattr`` is slow where none has."""
    return vars(module).get(name) or getattr(type(module), name, None)


@lru_cache(maxsize=1 << 16)
def prefixes(name: str) -> Tuple[str, ...]:
    """A name and those of the modules around it: ``''``, ``'a'``, ``'a.b'``."""
    parts = name.split('.') if name else []
    return tuple('.'.join(parts[:end]) for end in range(len(parts) + 1))


def nearest(name: str, known: Container[str]) -> Optional[str]:
    """The name itself or that of the innermost module around it, if one is known."""
    return next((prefix for prefix in reversed(prefixes(name)) if prefix in known), None)
