"""Record on which device everything of one training step is, for ``mmdevplug check``."""

import inspect
from functools import partial
from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Tuple

from torch import Tensor, nn

from mmdevplug.accelerators import devices_of
from mmdevplug.model.move import same_device
from mmdevplug.utils.model import list_optim_wrappers
from mmdevplug.utils.pytree import tensors_in

#: Since torch 2.0 hooks can get keyword arguments, too.
_KEYWORDS = (
    {'with_kwargs': True}
    if 'with_kwargs' in inspect.signature(nn.Module.register_forward_hook).parameters
    else {}
)

Devices = Tuple[str, ...]


class ModuleDevices(NamedTuple):
    """The devices of a module with all that is inside it."""

    name: str  # empty for the model itself
    kind: str
    size: int  # bytes of parameters and buffers
    weights: Devices
    inputs: Devices
    outputs: Devices
    gradients: Devices
    state: Devices


class StepDevices:
    """Record the devices of calls and gradients while this context is entered."""

    def __init__(self, model: nn.Module, optim_wrapper: Any) -> None:
        self._model = model
        self._optim_wrapper = optim_wrapper
        self._inputs: Dict[str, Dict[str, None]] = {}
        self._outputs: Dict[str, Dict[str, None]] = {}
        self._gradients: Dict[int, Any] = {}
        self._handles: List[Any] = []

    def __enter__(self) -> 'StepDevices':
        for name, module in self._model.named_modules():
            inputs = self._inputs.setdefault(name, {})
            outputs = self._outputs.setdefault(name, {})
            self._handles += [
                module.register_forward_pre_hook(partial(_note, inputs, 0), **_KEYWORDS),
                module.register_forward_hook(partial(_note, outputs, -1), **_KEYWORDS),
            ]
        for parameter in self._model.parameters():
            if parameter.requires_grad:
                note = partial(self._note_gradient, id(parameter))
                self._handles.append(parameter.register_hook(note))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _note_gradient(self, key: int, gradient: Tensor) -> None:
        self._gradients[key] = gradient.device

    def modules(self) -> List[ModuleDevices]:
        """Return all modules in the model's order."""
        state = self._state()
        rows = []
        for name, module in self._model.named_modules():
            tensors = [*module.parameters(), *module.buffers()]
            keys = [id(tensor) for tensor in tensors]
            rows.append(
                ModuleDevices(
                    name,
                    type(module).__name__,
                    sum(tensor.numel() * tensor.element_size() for tensor in tensors),
                    _named(devices_of(tensors)),
                    tuple(self._inputs.get(name, ())),
                    tuple(self._outputs.get(name, ())),
                    _named(self._gradients[key] for key in keys if key in self._gradients),
                    _named(device for key in keys for device in state.get(key, ())),
                )
            )
        return rows

    def problems(self) -> Iterator[str]:
        """Describe tensors that have to be on one device and are not, in one line each."""
        state = self._state()
        for name, parameter in self._model.named_parameters():
            found = self._gradients.get(id(parameter))
            if found is not None and not same_device(found, parameter.device):
                yield f'{name} is on {parameter.device}, but its gradient on {found}'
            for device in state.get(id(parameter), ()):
                if not same_device(device, parameter.device):
                    yield f'{name} is on {parameter.device}, but its optimizer state on {device}'
        for name, module in self._model.named_modules():
            own = devices_of([*module.parameters(recurse=False), *module.buffers(recurse=False)])
            if len(own) > 1:
                devices = ', '.join(map(str, own))
                yield f'{name or type(module).__name__} has tensors of its own on {devices}'
        made = [
            name
            for name, seen in self._outputs.items()
            if 'meta' in seen and 'meta' not in self._inputs[name]
        ]
        for name in made:
            inside = f'{name}.' if name else ''
            if not any(other.startswith(inside) for other in made if other != name):
                yield f'{name or "the model"} returns a tensor on meta, which holds no values'

    def _state(self) -> Dict[int, List[Any]]:
        """The devices of each parameter's state; scalars are on the host by design."""
        found: Dict[int, List[Any]] = {}
        for wrapper in list_optim_wrappers(self._optim_wrapper):
            for parameter, state in wrapper.optimizer.state.items():
                tensors = [tensor for tensor in tensors_in(state) if tensor.dim() > 0]
                found[id(parameter)] = devices_of(tensors)
        return found


def _note(seen: Dict[str, None], first: int, module: nn.Module, *args: Any) -> None:
    """Note the devices of all that a hook gets; from -1 on, of the output alone."""
    seen.update(dict.fromkeys(_named(devices_of(tensors_in(args[first:])))))


def _named(devices: Iterable[Any]) -> Devices:
    return tuple(dict.fromkeys(map(str, devices)))
