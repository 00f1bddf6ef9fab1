"""Explain an operation that got tensors of several devices: the line, and which tensor."""

import ast
import linecache
import os
import re
import sys
import sysconfig
from contextlib import contextmanager
from itertools import islice
from types import FrameType, TracebackType
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from mmdevplug.accelerators import device_context
from mmdevplug.device_guard.mismatch import Operand
from mmdevplug.device_guard.stack_location import LIBRARIES, module_and_backward
from mmdevplug.errors import DeviceMismatchError, DevPlugError, first_line
from mmdevplug.model.move import same_device
from mmdevplug.utils.model import unwrap_model
from mmdevplug.utils.pytree import tensors_in

from .versions import chain

#: Errors that say so; each vendor has words of its own.
_MIXED = re.compile(
    r"on the same device|not an XLA tensor|Expected XLA tensor|from the 'CPU' backend"
    r'|expected (it )?to be on|device type \w+ but got|(type|Tensor) \(.*should be the same'
)
#: Errors that may say so, if tensors of the line are on several devices.
_MAYBE = re.compile(r'device|\bcpu\b|\w+Tensor', re.IGNORECASE)
#: A name with attributes and constant indices.
_NAME = re.compile(r"(?<![\w.'\"])[A-Za-z_]\w*(?:\.[A-Za-z_]\w*|\[(?:\d+|'\w+'|\"\w+\")\])*")
_PART = re.compile(r"\.?([A-Za-z_]\w*)|\[(?:(\d+)|['\"](\w+)['\"])\]")
#: Functions that make tensors on the CPU unless they get a device.
_MAKER = re.compile(
    r'(as_)?tensor|scalar_tensor|from_numpy|zeros|ones|full|empty|arange|linspace|eye'
    r'|rand(n|int|perm)?|\w*Tensor'
)


@contextmanager
def explain_mixed_devices(runner: Any, stage: str) -> Iterator[None]:
    """Replace errors of operands on several devices by one that names the line and the tensor."""
    try:
        yield
    except (RuntimeError, TypeError, ValueError) as error:
        message = None if isinstance(error, DevPlugError) else _explain(error, runner, stage)
        if message is None:
            raise
        raise DeviceMismatchError(message) from error


def _explain(error: Exception, runner: Any, stage: str) -> Optional[str]:
    context = device_context()
    about_devices = (each for each in reversed(chain(error)) if _MAYBE.search(str(each)))
    cause = next(about_devices, None)
    if context is None or context.device.type == 'cpu' or cause is None:
        return None
    calls = _calls(cause)
    of_user = [i for i, call in enumerate(calls) if not _is_library(call.file)]
    if not of_user:
        return None
    user, called = calls[of_user[-1]], calls[of_user[-1] + 1 :]
    # The user's line first, whose names the user knows, then the arguments of what it called.
    named = [user.names(), *(call.arguments() for call in reversed(called))]
    strays = next(filter(None, (_strays(each, context.devices) for each in named)), {})
    found = [
        str(Operand(name, tensor.device, tensor.dtype, tuple(tensor.shape)))
        for name, tensor in strays.items()
    ]
    if not found:
        if len(context.devices) > 1 or not _MIXED.search(str(cause)):
            return None
        found = [f'`{call}` makes a tensor on the cpu' for call in user.makers()]
    module = _innermost_module(calls, runner.model)
    return (
        f'rank {runner.rank}, {stage}: {user.file}:{user.line}{f", in {module}" if module else ""}'
        f': {"; ".join(found) or "a tensor that is made in this line"}; expected on '
        f'{context.device}, where this run computes. The line: `{user.code}`. Make the tensor '
        f'with device=x.device, where x is an input, or keep it with register_buffer(), which '
        f'moves with the model. {type(cause).__name__}: {first_line(cause)}'
    )


def describe_place(error: BaseException, model: nn.Module) -> str:
    """Name the module and the user's line that an error comes from, in two lines, or with ''."""
    calls = _calls(error)
    user = next((call for call in reversed(calls) if not _is_library(call.file)), None)
    if user is None:
        return ''
    module = _innermost_module(calls, model) or 'outside the model'
    return f'\n  in: {module}\n  at: {user.file}:{user.line}: {user.code}'


def _innermost_module(calls: Sequence['_Call'], model: nn.Module) -> str:
    return module_and_backward(unwrap_model(model), [call.frame for call in reversed(calls)])[0]


def _is_library(file: str) -> bool:
    """Whether a file belongs to PyTorch, MMEngine, this package or Python, but not an example."""
    if file.startswith('<'):
        return True  # importlib and generated code
    paths = [getattr(sys.modules.get(name), '__path__', None) for name in LIBRARIES]
    if file.startswith(tuple(os.path.join(list(path)[0], '') for path in paths if path)):
        # The examples of this package count as a user's code.
        return os.path.join('mmdevplug', 'examples', '') not in file
    of_python = file.startswith(os.path.join(sysconfig.get_paths()['stdlib'], ''))
    return of_python and not re.search(r'[/\\](?:site|dist)-packages[/\\]', file)


class _Call(NamedTuple):
    """A frame of a traceback, and where it was."""

    frame: FrameType
    line: int
    text: str  # the part of the line that failed, as far as Python knows it

    @property
    def file(self) -> str:
        return self.frame.f_code.co_filename

    @property
    def code(self) -> str:
        return linecache.getline(self.file, self.line, self.frame.f_globals).strip()

    def names(self) -> Dict[str, Any]:
        """The values of the names in the text; of a method, the object that it belongs to."""
        return dict(self._look_up(match.group()) for match in _NAME.finditer(self.text))

    def _look_up(self, name: str) -> Tuple[str, Any]:
        first, *parts = _PART.finditer(name)
        value = self.frame.f_locals.get(first[0], self.frame.f_globals.get(first[0]))
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

    def arguments(self) -> Dict[str, Any]:
        """The arguments of the function, by name."""
        code, values = self.frame.f_code, self.frame.f_locals
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        return {name: values[name] for name in names if name in values}

    def makers(self) -> List[str]:
        """The calls in the text that make tensors without a device."""
        text = self.text.strip()
        try:
            nodes = list(ast.walk(ast.parse(text)))
        except SyntaxError:
            return []
        found: List[str] = []
        for node in nodes:  # the outer ones first
            name = _called(node)
            has_device = any(each.arg == 'device' for each in getattr(node, 'keywords', ()))
            if name and _MAKER.fullmatch(name) and not has_device:
                call = ast.get_source_segment(text, node) or name
                if not any(call in outer for outer in found):
                    found.append(call)
        return found


def _called(node: ast.AST) -> Optional[str]:
    """The last part of the name of the function that a node calls."""
    function = getattr(node, 'func', None)
    return getattr(function, 'attr', getattr(function, 'id', None))


def _calls(error: BaseException) -> List[_Call]:
    """The frames of the traceback of an error, the outermost first."""
    calls, trace = [], error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        calls.append(_Call(frame, trace.tb_lineno, _failing_text(frame, trace)))
        trace = trace.tb_next
    return calls


def _failing_text(frame: FrameType, trace: TracebackType) -> str:
    """The expression that failed, with Python 3.11, or else its first line."""
    code, first, last = frame.f_code, trace.tb_lineno, trace.tb_lineno
    begin, end = None, None
    if hasattr(code, 'co_positions'):
        positions = next(islice(code.co_positions(), trace.tb_lasti // 2, None))
        if None not in positions:
            first, last, begin, end = positions
    numbers = range(first, last + 1)
    lines = [linecache.getline(code.co_filename, n, frame.f_globals).encode() for n in numbers]
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][begin:]
    return b''.join(lines).decode(errors='replace')


def _strays(named: Dict[str, Any], devices: Sequence[torch.device]) -> Dict[str, Tensor]:
    """The tensors, by name, that are not on the devices of the run; numbers may be anywhere."""
    return {
        name: tensor
        for name, value in named.items()
        if not isinstance(value, nn.Module)
        for tensor in tensors_in(value)
        if tensor.dim() and not any(same_device(tensor.device, each) for each in devices)
    }
