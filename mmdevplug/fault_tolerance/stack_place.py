"""Say where a stack is: in which collective, layer and line of code."""

import inspect
import os
import re
import sysconfig
import traceback
from types import FrameType
from typing import List, Sequence, Tuple

import torch
from torch import nn

_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
#: Code that is less interesting than what calls it: PyTorch, the standard library, ours.
_FOREIGN = (
    os.path.dirname(torch.__file__),
    *(
        os.path.join(_OWN, room, '')
        for room in ('distributed', 'gradients', 'model', 'samples', 'staged')
    ),
)
_STANDARD = (sysconfig.get_paths()['stdlib'], '<frozen')
#: Functions that all ranks call, beside those of PyTorch's ``distributed_c10d.py``.
_OWN_COLLECTIVES = ('gather_samples', 'balance_samples')

#: Frames and the lines that they execute, the innermost first.
Stack = Sequence[Tuple[FrameType, int]]


def describe_error(error: BaseException) -> str:
    """Say where an error was raised."""
    inner = list(traceback.walk_tb(error.__traceback__))
    outer = list(traceback.walk_stack(inner[0][0].f_back)) if inner else []
    return describe_stack([*reversed(inner), *outer])


def describe_stack(stack: Stack, in_detail: bool = True) -> str:
    """Say where a stack is; ``in_detail`` with the collective and the layer.

    Details look at local variables, which Python before 3.13 keeps alive for as long as their
    function runs.
    """
    lines = [place for place in stack if not _is_foreign(place[0].f_code.co_filename)] or stack
    if not lines:
        return ''
    code, line = lines[0][0].f_code, lines[0][1]
    found = [f'{os.path.basename(code.co_filename)}:{line} in {code.co_name}']
    if in_detail:
        codes = [frame.f_code for frame, _ in reversed(stack)]
        names = [each.co_name for each in codes if _is_collective(each.co_filename, each.co_name)]
        layer = _layer(stack)
        found = [*names[:1], *([f'layer {layer!r}'] if layer else []), *found]
    return ', '.join(found)


def _layer(stack: Stack) -> str:
    """Name the innermost layer that computes, as the outermost module calls it."""
    owners: List[object] = [
        frame.f_locals.get('self')
        for frame, _ in stack
        if frame.f_code.co_varnames[:1] == ('self',)
    ]
    for owner in owners:
        # Without __getattr__() of objects that are being made, or are the user's.
        name = inspect.getattr_static(owner, 'layer_name', '')
        if isinstance(name, str) and name:
            return name
    # Not those that are being made, which have no list of modules yet.
    modules = [each for each in owners if isinstance(each, nn.Module) and '_modules' in vars(each)]
    try:
        named = [n for n, each in modules[-1].named_modules() if each is modules[0]]
    except (IndexError, RuntimeError):  # there is none, or the main thread adds some meanwhile
        return ''
    return re.sub(r'^module(\.|$)', '', named[0]) if named else ''


def _is_collective(file: str, name: str) -> bool:
    own = name in _OWN_COLLECTIVES and file.startswith(_OWN)
    return own or os.path.basename(file) == 'distributed_c10d.py'


def _is_foreign(file: str) -> bool:
    standard = file.startswith(_STANDARD) and 'site-packages' not in file
    return standard or file.startswith(_FOREIGN)
