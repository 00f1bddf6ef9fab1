"""Find the modules of a model that must stay on one device."""

from typing import Dict, Iterable, List, Set, Tuple, Type, Union

from torch import nn

from mmdevplug.errors import PlacementError

from .walk_modules import all_modules, class_or_own, named_tensors

#: Bases, by name, of modules that use the weights of their children without calling them: PEFT's
#: adapters beside their base layer, and what PEFT trains in full.
_USE_CHILDREN = {'BaseTunerLayer', 'AuxiliaryTrainingWrapper', 'ModulesToSaveWrapper'}


class WholeModules:
    """Finds the modules that must not be split.

    These are what the user names, what transformers names (``_no_split_modules``), and classes
    that repeat in a ``ModuleList`` or ``Sequential``: with few exceptions they add their input to
    their output, which needs both on one device. A class that only gathers such blocks is opened:
    its instances differ in shape (a stage of Swin or ConvNeXt) and hold a list of equal blocks.

    ``no_split`` has names of classes or of modules; what is neither raises PlacementError.
    """

    def __init__(self, model: nn.Module, no_split: Union[None, str, Iterable[str]] = None) -> None:
        self._named: Set[str] = {no_split} if isinstance(no_split, str) else set(no_split or ())
        modules = list({id(module): module for _, module in all_modules(model)}.values())
        kinds = {type(module) for module in modules}
        names = {kind.__name__ for kind in kinds}
        unknown = self._named - names
        unknown -= {name for name, _ in all_modules(model)} if unknown else set()
        if unknown:
            raise PlacementError(
                f'no_split names {", ".join(map(repr, sorted(unknown)))}, which is neither a '
                f'class nor a module of {type(model).__name__}. Its classes: '
                f'{", ".join(sorted(names)[:20])}.'
            )
        repeated = _find_repeated(modules)
        declared: Set[str] = set()
        for module in modules:
            declared.update(class_or_own(module, '_no_split_modules') or ())
        candidates = {kind for kind in kinds if kind.__name__ in declared} | set(repeated)
        self._opened = {kind for kind in candidates if _only_gathers(kind, repeated)}
        self._kept = candidates - self._opened
        self._always = {type(module).__name__ for module in modules if _uses_children(module)}

    def __contains__(self, named: Tuple[str, nn.Module]) -> bool:
        name, module = named
        return (
            (type(module) in self._kept and not _holds_its_own_class(module))
            or name in self._named
            or type(module).__name__ in self._named
            or _uses_children(module)
        )

    @property
    def classes(self) -> List[str]:
        """Names of the classes that are kept whole, and the user's list."""
        return sorted({kind.__name__ for kind in self._kept} | self._always | self._named)

    @property
    def opened(self) -> List[str]:
        """Names of the classes that were opened although they repeat or were declared."""
        return sorted(kind.__name__ for kind in self._opened)


def _find_repeated(modules: List[nn.Module]) -> Dict[Type[nn.Module], List[List[nn.Module]]]:
    """Classes of composite modules in lists, with their instances list by list."""
    found: Dict[Type[nn.Module], List[List[nn.Module]]] = {}
    for container in filter(is_container, modules):
        here: Dict[Type[nn.Module], List[nn.Module]] = {}
        for child in container.children():
            if not is_container(child) and any(c is not None for c in child._modules.values()):
                here.setdefault(type(child), []).append(child)
        for kind, children in here.items():
            found.setdefault(kind, []).append(children)
    return {kind: lists for kind, lists in found.items() if sum(map(len, lists)) > 1}


def _only_gathers(
    kind: Type[nn.Module], repeated: Dict[Type[nn.Module], List[List[nn.Module]]]
) -> bool:
    """Whether the instances of a class differ, and hold lists of equal blocks."""
    lists = repeated.get(kind)
    if lists is None or any(map(_has_equals, lists)):
        return False
    return any(
        _has_equals([child for child in container.children() if type(child) is other])
        for instances in lists
        for instance in instances
        for container in filter(is_container, instance.modules())
        for other in repeated
        if other is not kind
    )


def _has_equals(modules: List[nn.Module]) -> bool:
    """Whether two modules have tensors of the same names and shapes."""
    seen: Set[Tuple[Tuple[str, Tuple[int, ...]], ...]] = set()
    for module in modules:
        structure = tuple((name, tuple(tensor.shape)) for name, tensor in named_tensors(module))
        if structure in seen:
            return True
        seen.add(structure)
    return False


def is_container(module: nn.Module) -> bool:
    """Whether a module only calls its children in order."""
    if isinstance(module, nn.Sequential):
        return type(module).forward is nn.Sequential.forward
    return isinstance(module, (nn.ModuleList, nn.ModuleDict))


def _holds_its_own_class(module: nn.Module) -> bool:
    """Whether a class is nested in itself: then the innermost instances are the blocks."""
    return any(type(child) is type(module) for _, child in all_modules(module)[1:])


def _uses_children(module: nn.Module) -> bool:
    # PyTorch's attention reads the weight of its output projection; a parametrized module
    # computes its own weight from its children.
    return (
        isinstance(module, nn.MultiheadAttention)
        or 'parametrizations' in module._modules
        or any(base.__name__ in _USE_CHILDREN for base in type(module).__mro__)
    )
