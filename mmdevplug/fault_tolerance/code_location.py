"""Say where a thread is, or was when an error left it: collective, layer, line of code."""

import inspect
import os
import re
import sys
import sysconfig
import traceback
from types import FrameType
from typing import Any, Iterable, Iterator, List, Optional, Tuple

from torch import nn

_STANDARD = (sysconfig.get_paths()['stdlib'], sysconfig.get_paths()['platstdlib'])
_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
#: Rooms whose code is no more interesting than what calls it.
_INNER = tuple(
    os.path.join(_OWN, room, '') for room in ('distributed', 'gradients', 'model', 'samples')
)
#: Functions that all ranks call, and the files that define them.
_COLLECTIVES = 'distributed_c10d.py'
_OWN_COLLECTIVES = ('gather_samples', 'balance_samples')

#: A frame and the line that it executes.
Place = Tuple[FrameType, int]


def locate_thread(ident: Optional[int], in_detail: bool) -> str:
    """Say where a thread is; ``in_detail`` with the collective and the layer.

    Details look at local variables, which Python before 3.13 keeps alive for as long as their
    function runs.
    """
    frame = sys._current_frames().get(ident or 0)
    return _describe(_outwards(frame), in_detail)


def locate_error(error: BaseException) -> str:
    """Say where an error was raised."""
    inner = list(traceback.walk_tb(error.__traceback__))
    outer = _outwards(inner[0][0].f_back) if inner else []
    return _describe([*reversed(inner), *outer], in_detail=True)


def _outwards(frame: Optional[FrameType]) -> List[Place]:
    return [(each, line) for each, line in traceback.walk_stack(frame)] if frame else []


def _describe(places: List[Place], in_detail: bool) -> str:
    """``places`` are those of a stack, the innermost first."""
    if not places:
        return ''
    names = [each.f_code.co_name for each, _ in places if in_detail and _is_collective(each)]
    # Inside a collective, the line that calls it; elsewhere one of ours says more.
    own = [place for place in places if not _is_foreign(place[0])]
    callers = [place for place in own if not _file(place[0]).startswith(_INNER)] if names else []
    frame, line = (callers or own or places)[0]
    code = frame.f_code
    layer = _layer([each for each, _ in places]) if in_detail else ''
    text = f'{os.path.basename(code.co_filename)}:{line} in {code.co_name}'
    return ', '.join([*names[-1:], *([layer] if layer else []), text])


def _is_collective(frame: FrameType) -> bool:
    own = frame.f_code.co_name in _OWN_COLLECTIVES and _file(frame).startswith(_OWN)
    return own or os.path.basename(_file(frame)) == _COLLECTIVES


def _layer(frames: Iterable[FrameType]) -> str:
    """Name the innermost layer that computes, as it is called in the outermost module."""
    owners = list(_owners(frames))
    for owner in owners:
        # Without __getattr__() of objects that are being made, or are the user's.
        name = inspect.getattr_static(owner, 'layer_name', '')
        if isinstance(name, str) and name:
            return f'layer {name!r}'
    # Not those that are being made, which have no list of modules yet.
    modules = [each for each in owners if isinstance(each, nn.Module) and '_modules' in vars(each)]
    name = _name_inside(modules[-1], modules[0]) if modules else ''
    return f'layer {name!r} ({type(modules[0]).__name__})' if name else ''


def _name_inside(outer: nn.Module, wanted: nn.Module) -> str:
    """The name of a module inside another, without that of a wrapper; empty if it has none."""
    try:
        names = [name for name, module in outer.named_modules() if module is wanted]
    except RuntimeError:  # the main thread adds modules meanwhile
        return ''
    return re.sub(r'^module(\.|$)', '', names[0]) if names else ''


def _owners(frames: Iterable[FrameType]) -> Iterator[Any]:
    """The objects whose methods are executed."""
    for frame in frames:
        if frame.f_code.co_varnames[:1] == ('self',):
            yield frame.f_locals.get('self')


def _file(frame: FrameType) -> str:
    return frame.f_code.co_filename


def _is_foreign(frame: FrameType) -> bool:
    """Whether code is of PyTorch or of the standard library."""
    name = _file(frame)
    if 'site-packages' in name:
        return f'site-packages{os.sep}torch' in name
    return name.startswith(_STANDARD) or name.startswith('<frozen')
