"""Find where an operation is called from: the user's line and the module of the model.

Both are read off the Python stack when they are needed, so that nothing has to be recorded before,
nothing to be undone after an exception, and each thread tells its own.
"""

import linecache
import sys
from types import FrameType
from typing import Any, Dict, Iterator, Optional, Tuple

from torch import nn
from torch.autograd.function import BackwardCFunction

from .mismatch import Source

#: Their lines are not the user's.
LIBRARIES = frozenset(
    ['torch', 'torch_xla', 'functorch', 'mmengine', 'accelerate', 'mmdevplug', 'contextlib']
)
#: What this package teaches by is a user's code.
EXAMPLES = 'mmdevplug.examples'
_GUARD = __name__.rpartition('.')[0]


def user_frame() -> Optional[FrameType]:
    """The innermost frame outside the libraries; None if there is none."""
    for frame in _frames():
        name = frame.f_globals.get('__name__') or ''
        if name.partition('.')[0] not in LIBRARIES or name.startswith(EXAMPLES):
            return frame
    return None


def source_of(frame: Optional[FrameType]) -> Optional[Source]:
    """The line that a frame is at."""
    if frame is None:
        return None
    file, line = frame.f_code.co_filename, frame.f_lineno
    code = linecache.getline(file, line, frame.f_globals).strip()
    return Source(file, line, code or '(no source)')


def module_and_backward(model: Optional[nn.Module]) -> Tuple[str, str]:
    """The innermost module at work, and the backward it is in.

    Args:
        model (nn.Module, optional): What the module's path starts from. Defaults to None: the
            outermost module at work.

    Returns:
        tuple: A path and class such as ``'decode_head.conv_seg (Conv2d)'`` and the name of a node
        such as ``'RoIAlignBackward'``; ``''`` for what there is not.
    """
    inner, outer, backward = None, None, ''
    for frame in _frames():
        owner = _first_argument(frame)
        if isinstance(owner, nn.Module):
            inner, outer = owner if inner is None else inner, owner
        elif frame.f_code is _APPLY and isinstance(owner, BackwardCFunction):
            # What lies further out started the backward; it is not where this was computed.
            backward = type(owner).__name__
            break
    if inner is None:
        return '', backward
    for root in (model, outer):
        name = None if root is None else _path(root, inner)
        if name is not None:
            return f'{name} ({type(inner).__name__})'.strip(), backward
    return f'({type(inner).__name__})', backward


#: Kept from before anything wraps it.
_APPLY = BackwardCFunction.apply.__code__


def _frames() -> Iterator[FrameType]:
    """The frames of this thread outside the guard itself, the innermost first."""
    frame: Optional[FrameType] = sys._getframe(1)
    while frame is not None:
        if not (frame.f_globals.get('__name__') or '').startswith(_GUARD):
            yield frame
        frame = frame.f_back


def _first_argument(frame: FrameType) -> Any:
    code = frame.f_code
    return frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None


#: Paths found before, by root and module; looked at again before they are told.
_known: Dict[Tuple[int, int], str] = {}


def _path(root: nn.Module, module: nn.Module) -> Optional[str]:
    """The path of a module inside another; None if it is not there."""
    key = id(root), id(module)
    known = _known.get(key)
    if known is not None and _at(root, known) is module:
        return known
    names = {id(part): name for name, part in root.named_modules()}
    found = names.get(id(module))
    if found is not None:
        _known[key] = found
    return found


def _at(root: nn.Module, path: str) -> Any:
    part: Any = root
    for name in filter(None, path.split('.')):
        part = getattr(part, name, None)
    return part
