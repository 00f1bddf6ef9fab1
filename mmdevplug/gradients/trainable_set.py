"""Notice parameters that begin or cease to be trained after a model was wrapped.

A hook may unfreeze a backbone, freeze it after wrapping, or replace a module. PyTorch's DDP
averages the gradients of the parameters that it was built with, and says nothing of others: ranks
would train different models from then on.
"""

from contextlib import contextmanager
from typing import Dict, FrozenSet, Iterator, List, Optional, Sequence, Tuple

from torch import Tensor, nn

from mmdevplug.errors import ModelError
from mmdevplug.utils.annotations import AnyOptimWrapper
from mmdevplug.utils.logs import log_warning
from mmdevplug.utils.model import list_optim_wrappers

from .unused_parameters import list_names

#: The phase of a rank that waits until all have noticed that other parameters are trained.
COMPARING = 'comparing the parameters that are trained'


class TrainableSet:
    """Hold the parameters whose gradients are averaged, and compare them with the module's.

    ``tolerates_unused`` says that averaging goes on if some of them have no gradient any more.
    Parameters of ``before`` that are frozen now are kept then: two halves of a model may be frozen
    in turns, as those of a GAN, and nothing starts anew for them.

    Attributes:
        named: Names and parameters, in the module's order.
    """

    def __init__(
        self, module: nn.Module, tolerates_unused: bool, before: Optional['TrainableSet'] = None
    ) -> None:
        self.module = module
        self.tolerates_unused = tolerates_unused
        kept = before._ids if before is not None and tolerates_unused else frozenset()
        self.named: List[Tuple[str, nn.Parameter]] = []
        averaged: Dict[int, nn.Parameter] = {}
        for name, parameter in module.named_parameters():
            if parameter.requires_grad or id(parameter) in kept:
                self.named.append((name, parameter))
                averaged[id(parameter)] = parameter
        self._ids: FrozenSet[int] = frozenset(averaged)
        self._last = _trainable_ids(module)
        self._changed = before is not None
        #: The number of optimized parameters when they were last checked.
        self._optimized = -1
        #: All parameters that were ever averaged. While they are held no other gets their ids.
        self._known: Dict[int, nn.Parameter] = {} if before is None else before._known
        self._known.update(averaged)
        tensors = [*module.parameters(), *module.buffers()]
        #: What every rank has to get from rank 0: tensors of modules that are new.
        self.new: List[Tensor] = []
        #: Buffers that each rank keeps as they are.
        self.kept_buffers: List[Tensor] = []
        if before is not None:
            self.new = [t for t in tensors if id(t) not in before._tensors]
            self.kept_buffers = [b for b in module.buffers() if id(b) in before._tensors]
        self._tensors: Dict[int, Tensor] = dict(zip(map(id, tensors), tensors))

    def has_changed(self) -> bool:
        """Return whether averaging has to begin anew; takes 0.1 ms for 400 modules."""
        found = _trainable_ids(self.module)
        if found == self._last:
            return False
        self._last = found
        ceased = not self.tolerates_unused and not self._ids.issubset(found)
        # With nothing to train, the check of the loss has the better message.
        return bool(found) and (ceased or not self._ids.issuperset(found))

    def describe_change(self, before: 'TrainableSet') -> str:
        """Name what is averaged now and was not before, and the other way round."""
        now, then = dict(self.named), dict(before.named)
        began = [name for name in now if now[name] is not then.get(name)]
        ceased = [name for name in then if then[name] is not now.get(name)]
        texts = [f'now {list_names(began)}'] if began else []
        return '; '.join(texts + ([f'no longer {list_names(ceased)}'] if ceased else []))

    @contextmanager
    def requiring_gradients(self) -> Iterator[None]:
        """Let frozen parameters require gradients, without which they take no hooks."""
        frozen = [parameter for _, parameter in self.named if not parameter.requires_grad]
        for parameter in frozen:
            parameter.requires_grad_(True)
        try:
            yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)


def check_optimizers(
    module: nn.Module, sets: Sequence[TrainableSet], optim_wrapper: AnyOptimWrapper
) -> None:
    """Compare what the optimizers hold with what is averaged, once after each change of either.

    Raises:
        ModelError: If a parameter that is optimized was never part of the module.
    """
    optimized: List[nn.Parameter] = []
    for wrapper in list_optim_wrappers(optim_wrapper):
        for group in wrapper.optimizer.param_groups:
            optimized += group['params']
    checked, changed = True, False
    for one in sets:
        checked = checked and one._optimized == len(optimized)
        one._optimized = len(optimized)
        changed = changed or one._changed
    if checked:
        return
    inside, name = set(map(id, module.parameters())), type(module).__name__
    known = inside.union(*(one._known for one in sets))
    foreign = [str(tuple(p.shape)) for p in optimized if p.requires_grad and id(p) not in known]
    if foreign:
        raise ModelError(
            f'the optimizer holds {len(foreign)} parameter(s) that are not part of {name}, of '
            f'shape {list_names(foreign)}. Their gradients would not be averaged, and each rank '
            f'would train other values. Expected parameters of the model: assign them to a module '
            f'in it before they are given to the optimizer (add_param_group).'
        )
    if not changed:
        return
    held = {id(parameter) for parameter in optimized}
    idle = [
        parameter_name
        for one in sets
        for parameter_name, p in one.named
        if p.requires_grad and id(p) not in held
    ]
    if idle:
        log_warning(
            f'No optimizer holds {list_names(idle)}, which require gradients now: nothing updates '
            f'them. Call optim_wrapper.optimizer.add_param_group(), or freeze them.'
        )
    if not held <= inside:
        log_warning(
            f'The optimizer still holds {len(held - inside)} parameter(s) that are no longer part '
            f'of {name}. They stay as they are.'
        )


def _trainable_ids(module: nn.Module) -> List[int]:
    """List the ids of trainable parameters; ``named_parameters`` takes several times as long."""
    found: List[int] = []
    pending: List[Optional[nn.Module]] = [module]
    while pending:
        part = pending.pop()
        if part is not None:
            for parameter in part._parameters.values():
                if parameter is not None and parameter.requires_grad:
                    found.append(id(parameter))
            pending.extend(part._modules.values())
    return found
