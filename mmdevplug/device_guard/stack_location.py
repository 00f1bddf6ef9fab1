"""Find where an operation is called: the user's line and the module of the model.

Both are read from the Python stack when they are needed, so nothing has to be recorded.
"""

import linecache
import sys
from types import FrameType
from typing import Dict, Iterable, Iterator, Optional, Tuple

from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from .mismatch import Source

#: Packages whose lines are not the user's.
LIBRARIES = frozenset(
    ['torch', 'torch_xla', 'functorch', 'mmengine', 'accelerate', 'mmdevplug', 'contextlib']
)
#: The examples count as user code.
EXAMPLES = 'mmdevplug.examples'
_GUARD = __name__.rpartition('.')[0]


def user_frame() -> Optional[FrameType]:
    """The innermost frame outside the libraries; None if there is none."""
    return next(filter(is_of_user, _frames()), None)


def is_of_user(frame: FrameType) -> bool:
    """Whether a frame runs the code of none of the libraries."""
    name = frame.f_globals.get('__name__') or ''
    return name.partition('.')[0] not in LIBRARIES or name.startswith(EXAMPLES)


def source_of(frame: Optional[FrameType]) -> Optional[Source]:
    """The current line of a frame."""
    if frame is None:
        return None
    file, line = frame.f_code.co_filename, frame.f_lineno
    code = linecache.getline(file, line, frame.f_globals).strip()
    function = getattr(frame.f_code, 'co_qualname', frame.f_code.co_name)
    function = '' if function == '<module>' else function.replace('.<locals>', '')
    return Source(file, line, code or '(no source)', function)


def variables_of(frame: Optional[FrameType]) -> Dict[int, str]:
    """The names by which a frame knows its tensors: variables, and attributes of ``self``."""
    if frame is None:
        return {}
    owner = frame.f_locals.get('self')
    held = {f'self.{name}': value for name, value in getattr(owner, '__dict__', {}).items()}
    named = {**held, **frame.f_locals}
    return {id(value): name for name, value in named.items() if isinstance(value, Tensor)}


def module_and_backward(
    model: Optional[nn.Module], frames: Optional[Iterable[FrameType]] = None
) -> Tuple[str, str]:
    """The innermost module, e.g. ``'decode_head.conv_seg (Conv2d)'``, and its backward.

    The path starts from ``model``, or else from the outermost module on the stack. The backward is
    the name of a graph node such as ``'RoIAlignBackward'``. Both are ``''`` if there is none.
    ``frames`` are those of a traceback, innermost first, in place of the current stack.
    """
    inner, outer, backward = None, None, ''
    for frame in _frames() if frames is None else frames:
        code = frame.f_code
        owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if isinstance(owner, nn.Module):
            inner, outer = owner if inner is None else inner, owner
        elif code is _APPLY and isinstance(owner, BackwardCFunction):
            # Outer frames started the backward; they are not where this is computed.
            backward = type(owner).__name__
            break
    if inner is None:
        return '', backward
    for root in (model, outer):
        name = None if root is None else _path(root, inner)
        if name is not None:
            return f'{name} ({type(inner).__name__})'.strip(), backward
    return f'({type(inner).__name__})', backward


#: Before it is patched.
_APPLY = BackwardCFunction.apply.__code__


def _frames() -> Iterator[FrameType]:
    """The frames of this thread outside the guard, innermost first."""
    frame: Optional[FrameType] = sys._getframe(1)
    while frame is not None:
        if not (frame.f_globals.get('__name__') or '').startswith(_GUARD):
            yield frame
        frame = frame.f_back


#: Paths by root and module; checked before they are used.
_known: Dict[Tuple[int, int], str] = {}


def _path(root: nn.Module, module: nn.Module) -> Optional[str]:
    """The path of a module inside another; None if it is not inside."""
    key = id(root), id(module)
    known = _known.get(key)
    if known is not None and _at(root, known) is module:
        return known
    names = {id(part): name for name, part in root.named_modules()}
    found = names.get(id(module))
    if found is not None:
        _known[key] = found
    return found


def _at(root: nn.Module, path: str) -> object:
    part: object = root
    for name in filter(None, path.split('.')):
        part = getattr(part, name, None)
    return part
