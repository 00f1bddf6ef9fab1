"""Explain an error of PyTorch's that came from operands on several devices: line and tensor."""

import linecache
import re
import traceback
from contextlib import contextmanager
from types import FrameType
from typing import Any, Dict, Iterator, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from mmdevplug.errors import DeviceMismatchError, DevPlugError, ModelError, chain, first_line
from mmdevplug.utils.pytree import tensors_in

from .mismatch import Operand
from .stack_location import is_of_user, module_and_backward

#: Errors that say so; each vendor has words of its own.
_MIXED = re.compile(
    r"on the same device|not an XLA tensor|Expected XLA tensor|from the 'CPU' backend"
    r'|expected (it )?to be on|device type \w+ but got|(type|Tensor) \(.*should be the same'
)
#: Errors that may say so, if tensors of the line are on several devices.
_MAYBE = re.compile(r'device|\bcpu\b|\w+Tensor', re.IGNORECASE)
#: Errors of a line that asks for CUDA where there is none, and what to write in its place.
_CUDA = {
    r'not compiled with CUDA|NVIDIA driver|No CUDA GPUs|re-initialize CUDA'
    r'|torch\.cuda\.\w*Tensor not available': (
        'Take the device of an input: x.to(y.device), y.new_zeros(...) or device=y.device'
    ),
    r'AmpOptim\w+\W+is only available': (
        "Build mmdevplug.optim.DeviceAmpOptimWrapper there, or the constructor's optim_wrapper_cfg"
    ),
}
#: A name with attributes and constant indices.
_NAME = re.compile(r"(?<![\w.'\"])[A-Za-z_]\w*(?:\.[A-Za-z_]\w*|\[(?:\d+|'\w+'|\"\w+\")\])*")
_PART = re.compile(r"\.?([A-Za-z_]\w*)|\[(?:(\d+)|['\"](\w+)['\"])\]")
Call = Tuple[FrameType, int]  # with the line that was running


@contextmanager
def explain_mixed_devices(
    model: nn.Module, devices: Sequence[torch.device], stage: str
) -> Iterator[None]:
    """Replace errors of operands on several devices by one that names the line and the tensor.

    Args:
        model (nn.Module): In which modules are named.
        devices (Sequence[torch.device]): Of this process; the first is expected.
        stage (str): What this process does, for the message.

    Raises:
        DeviceMismatchError: In place of PyTorch's error.
    """
    try:
        yield
    except (RuntimeError, TypeError, ValueError) as error:
        message = None if isinstance(error, DevPlugError) else _explain(error, model, devices)
        if message is None:
            raise
        raise DeviceMismatchError(f'{stage}: {message}') from error


@contextmanager
def explain_cuda(device: torch.device) -> Iterator[None]:
    """Name the line that asks for CUDA in a run on another device, in place of PyTorch's error.

    Raises:
        ModelError: In place of PyTorch's error.
    """
    try:
        yield
    except Exception as error:
        cause, advice = _cause_about_cuda(error)
        calls = [] if cause is None else list(traceback.walk_tb(cause.__traceback__))
        user = next((call for call in reversed(calls) if is_of_user(call[0])), None)
        if isinstance(error, DevPlugError) or device.type == 'cuda' or user is None:
            raise
        raise ModelError(
            f'{user[0].f_code.co_filename}:{user[1]} asks for CUDA, and this run computes on '
            f'{device}. The line: `{_code(user)}`. {advice}. '
            f'{type(cause).__name__}: {first_line(cause)}'
        ) from error


def _cause_about_cuda(error: Exception) -> Tuple[Optional[BaseException], str]:
    """The innermost cause that says that there is no CUDA, and advice."""
    for cause in reversed(chain(error)):
        for words, advice in _CUDA.items():
            if re.search(words, str(cause)):
                return cause, advice
    return None, ''


def _explain(error: Exception, model: nn.Module, devices: Sequence[torch.device]) -> Optional[str]:
    cause = next((each for each in reversed(chain(error)) if _MAYBE.search(str(each))), None)
    if cause is None or devices[0].type == 'cpu':
        return None
    calls = list(traceback.walk_tb(cause.__traceback__))
    of_user = [number for number, (frame, _) in enumerate(calls) if is_of_user(frame)]
    if not of_user:
        return None
    user, called = calls[of_user[-1]], calls[of_user[-1] + 1 :]
    # The user's line first, whose names the user knows, then the arguments of what it called.
    named = [_names(user), *(_arguments(frame) for frame, _ in reversed(called))]
    strays = next(filter(None, (_strays(each, devices) for each in named)), {})
    found = [
        str(Operand(name, tensor.device, tensor.dtype, tuple(tensor.shape)))
        for name, tensor in strays.items()
    ]
    if not found and (len(devices) > 1 or not _MIXED.search(str(cause))):
        return None
    module = module_and_backward(model, [frame for frame, _ in reversed(calls)])[0]
    return (
        f'{user[0].f_code.co_filename}:{user[1]}{f", in {module}" if module else ""}'
        f': {"; ".join(found) or "a tensor that is made in this line on the cpu"}; expected on '
        f'{devices[0]}, where this run computes. The line: `{_code(user)}`. Make the tensor '
        f'with device=x.device, where x is an input, or keep it with register_buffer(), which '
        f'moves with the model. {type(cause).__name__}: {first_line(cause)}'
    )


def describe_place(error: BaseException, model: nn.Module) -> str:
    """Name the module and the user's line that an error comes from, in two lines, or with ''."""
    calls = list(traceback.walk_tb(error.__traceback__))[::-1]
    user = next((call for call in calls if is_of_user(call[0])), None)
    if user is None:
        return ''
    module = module_and_backward(model, [frame for frame, _ in calls])[0] or 'outside the model'
    return f'\n  in: {module}\n  at: {user[0].f_code.co_filename}:{user[1]}: {_code(user)}'


def _code(call: Call) -> str:
    frame, line = call
    return linecache.getline(frame.f_code.co_filename, line, frame.f_globals).strip()


def _names(call: Call) -> Dict[str, object]:
    """The values of the names in a line; of a method, the object that it belongs to."""
    return dict(_look_up(call[0], match.group()) for match in _NAME.finditer(_code(call)))


def _look_up(frame: FrameType, name: str) -> Tuple[str, object]:
    first, *parts = _PART.finditer(name)
    value: Any = frame.f_locals.get(first[0], frame.f_globals.get(first[0]))
    for part in parts:
        attribute, index, key = part.groups()
        try:
            inner = getattr(value, attribute) if attribute else value[key or int(index)]
        except Exception:  # whatever the object's own code raises
            return name, None
        if callable(inner) and not isinstance(inner, nn.Module):
            return name[: part.start()], value
        value = inner
    return name, value


def _arguments(frame: FrameType) -> Dict[str, object]:
    code, values = frame.f_code, frame.f_locals
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return {name: values[name] for name in names if name in values}


def _strays(named: Dict[str, object], devices: Sequence[torch.device]) -> Dict[str, Tensor]:
    """The tensors, by name, that are not on the devices of the run; numbers may be anywhere."""
    here = {(device.type, device.index or 0) for device in devices}
    return {
        name: tensor
        for name, value in named.items()
        if not isinstance(value, nn.Module)
        for tensor in tensors_in(value)
        if tensor.dim() and (tensor.device.type, tensor.device.index or 0) not in here
    }
