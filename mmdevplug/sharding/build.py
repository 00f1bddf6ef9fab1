"""Build and initialize a model whose whole weights only rank 0 holds, on the host."""

import copy
import functools
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterator, List, Optional

import torch
from torch import Tensor, distributed as torch_dist, nn

from mmdevplug.accelerators import DeviceContext
from mmdevplug.accelerators.random_states import host_random_state, set_host_random_state
from mmdevplug.distributed.byte_exchange import gather_json
from mmdevplug.distributed.coalesced import broadcast_tensors
from mmdevplug.errors import ModelError
from mmdevplug.patches.torch_load import safe_loading
from mmdevplug.utils.logs import log_warning
from mmdevplug.utils.pytree import replace_parts, tensors_in

from .states import CopyingWhole, is_sharded

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle


@contextmanager
def drawing_as_first_rank() -> Iterator[None]:
    """Continue with the random state of rank 0, on ranks that had its state before."""
    before = gather_json(host_random_state())
    yield
    after = gather_json(host_random_state() if torch_dist.get_rank() == 0 else None)[0]
    if before[torch_dist.get_rank()] == before[0]:
        set_host_random_state(after)


def build_without_weights(build: Callable[[], nn.Module]) -> nn.Module:
    """Build a model; on all ranks but the first its parameters are on the meta device."""
    with drawing_as_first_rank():
        state = host_random_state()
        try:
            if torch_dist.get_rank() > 0:
                with _parameters_on_meta():
                    return build()
        except (RuntimeError, NotImplementedError) as error:
            if 'meta' not in str(error).lower():
                raise
            log_warning('sharding: the model reads its weights while it is built: all are built.')
        set_host_random_state(state)
        return build()


def _parameters_on_meta() -> 'RemovableHandle':
    """Move each parameter to the meta device when a module registers it; tied ones stay tied."""
    from torch.nn.modules.module import register_module_parameter_registration_hook
    from torch.utils.weak import WeakIdKeyDictionary  # both since PyTorch 2.0

    moved = WeakIdKeyDictionary()

    def move(_: nn.Module, __: str, param: nn.Parameter) -> Any:
        return moved.setdefault(param, _on_device(param, torch.device('meta')))

    return register_module_parameter_registration_hook(move)


def _on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Move a tensor with its class and attributes; one of the meta device gets memory."""
    if tensor.device == device:
        return tensor
    on_meta = tensor.device.type == 'meta'
    value = torch.empty_like(tensor, device=device) if on_meta else tensor.detach().to(device)
    if isinstance(tensor, nn.Parameter):
        value = nn.Parameter(value, tensor.requires_grad)
        value.__class__ = type(tensor)
    vars(value).update(vars(tensor))
    return value


def place(module: nn.Module, context: DeviceContext) -> None:
    """Put what is not sharded yet on the device of this rank, with the values of rank 0."""
    made: Dict[int, Tensor] = {}
    for part in module.modules():
        tables: List[Dict[str, Any]] = [part._parameters, part._buffers]
        for slots in tables:
            for name, tensor in slots.items():
                if tensor is not None and not is_sharded(tensor):
                    slots[name] = made.setdefault(id(tensor), _on_device(tensor, context.device))
    broadcast_tensors(list(made.values()), context.accelerator)


def keep_whole(model: nn.Module) -> Optional[nn.Module]:
    """On rank 0, copy the modules of a model that is about to be sharded, not its weights."""
    if torch_dist.get_rank() > 0:
        return None
    copies = {part: object.__new__(type(part)) for part in model.modules()}
    made: Dict[int, object] = {id(each): each for each in model.parameters()}
    made.update((id(part), copied) for part, copied in copies.items())
    for part, copied in copies.items():
        for name, value in vars(part).items():
            try:
                vars(copied)[name] = copy.deepcopy(value, made)
            except (TypeError, RuntimeError, copy.Error):  # a lock, or a tensor with a gradient
                vars(copied)[name] = value
    return copies[model]


def initialize(model: nn.Module, whole: Optional[nn.Module], context: DeviceContext) -> None:
    """Call ``init_weights`` of the whole model, which rank 0 has, and shard the result.

    Random numbers are drawn for whole weights, in the order of one process: so are the values.
    """
    values: Dict[str, Tensor] = {}
    hooked = False
    with drawing_as_first_rank():
        if whole is not None:
            with safe_loading('named in init_cfg', forced=False):
                before = _hooks(whole)
                getattr(whole, 'init_weights', list)()
                hooked = _hooks(whole) != before
            values = {**dict(whole.named_parameters()), **dict(whole.named_buffers())}
    trained = [name for name, each in values.items() if each.requires_grad]
    trained, hooked = gather_json([trained, hooked])[0]
    if hooked:
        raise ModelError(
            'sharding: init_weights registers hooks, and it is called with a copy of the model, '
            'before its weights are sharded. Register hooks of modules in the constructor; '
            'sharded weights take none.'
        )
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        missing = torch.empty(tensor.shape, dtype=tensor.dtype, device='meta')
        value = _on_device(values.pop(name, missing), context.device).detach()
        broadcast_tensors([value], context.accelerator)
        with torch.no_grad(), CopyingWhole():
            tensor.copy_(value)
        tensor.requires_grad_(name in trained)


def has_hooks(weight: nn.Parameter) -> bool:
    """Whether code is registered to be called with the gradient of a weight."""
    return bool(weight._backward_hooks or getattr(weight, '_post_accumulate_grad_hooks', None))


def _hooks(model: nn.Module) -> object:
    kinds = ('_forward_hooks', '_forward_pre_hooks', '_backward_hooks', '_backward_pre_hooks')
    parts = [[len(vars(part).get(kind, ())) for kind in kinds] for part in model.modules()]
    return parts, [name for name, each in model.named_parameters() if has_hooks(each)]


def share_plain_tensors(model: nn.Module, whole: nn.Module, context: DeviceContext) -> None:
    """Give all ranks the tensors that are attributes of modules of rank 0, such as masks.

    Elsewhere they may be on the meta device, or drawn after numbers that were not.
    """
    made: Dict[int, Tensor] = {}
    places = []
    for name, part in whole.named_modules():
        for attribute, value in vars(part).items():
            here = [] if attribute in _SLOTS else [*filter(_is_plain, tensors_in(value))]
            for each in here:
                made.setdefault(id(each), each.detach().contiguous())
            if here:
                places.append((name, attribute, [[*made].index(id(each)) for each in here]))
    sizes = [[list(each.shape), str(each.dtype)[len('torch.') :]] for each in made.values()]
    places, sizes = gather_json([places, sizes])[0]
    if torch_dist.get_rank() == 0:
        values = [each.to(context.device) for each in made.values()]
    else:
        device = context.device
        values = [
            torch.empty(shape, dtype=getattr(torch, kind), device=device) for shape, kind in sizes
        ]
    broadcast_tensors(values, context.accelerator)
    values = [each.cpu() for each in values]
    for name, attribute, numbers in places:
        attributes, given = vars(model.get_submodule(name)), [values[number] for number in numbers]
        there: object = attributes.get(attribute)
        if len([*filter(_is_plain, tensors_in(there))]) != len(given):
            if len(given) > 1:
                raise ModelError(
                    f'sharding: {name}.{attribute} has {len(given)} tensors on rank 0 and others '
                    f'elsewhere, where it was made without values. Make them buffers.'
                )
            there = given[0]  # on rank 0 alone, made by init_weights
        attributes[attribute] = replace_parts(there, functools.partial(_take_next, given))


def _take_next(given: List[Tensor], here: Tensor) -> Tensor:
    return given.pop(0) if _is_plain(here) else here


_SLOTS = ('_parameters', '_buffers', '_modules')


def _is_plain(tensor: object) -> bool:
    return isinstance(tensor, Tensor) and not isinstance(tensor, nn.Parameter)
