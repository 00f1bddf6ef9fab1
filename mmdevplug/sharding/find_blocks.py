"""Choose the modules of a model that are gathered and freed as one."""

from typing import List, Optional, Sequence

from torch import nn

from mmdevplug.errors import ModelError
from mmdevplug.model_parallel.units import find_units, shared_names
from mmdevplug.model_parallel.unsplittable import WholeModules
from mmdevplug.model_parallel.walk_modules import all_modules


def find_blocks(model: nn.Module, named: Optional[Sequence[str]] = None) -> List[str]:
    """Name the blocks that a device map keeps whole, or those that are or belong to ``named``.

    A block that shares a parameter with a module outside of it stays with the rest of the model.
    """
    modules = dict(all_modules(model))
    if named is None:
        whole = WholeModules(model)
        units = [unit.name for unit in find_units(model, whole) if unit.name and unit.holds]
        names = [name for name in units if name in modules and (name, modules[name]) in whole]
    else:
        names = [n for n, m in modules.items() if n and {n, type(m).__name__} & set(named)]
        found = {*names, *(type(modules[name]).__name__ for name in names)}
        unknown = [name for name in named if name not in found]
        if unknown:
            raise ModelError(
                f'sharding.blocks names {unknown}, which is neither a class nor a module inside '
                f'of {type(model).__name__}. Correct the names, or leave the option out.'
            )
    shared = shared_names(model)
    return [
        name
        for name in names
        if all(sum(n.startswith(f'{name}.') for n in tied) in (0, len(tied)) for tied in shared)
    ]
