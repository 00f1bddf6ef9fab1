"""Explain code that asks for CUDA while a run computes elsewhere: which line, what to write."""

import linecache
import os
import re
import sys
import sysconfig
import traceback
from contextlib import contextmanager
from typing import Any, Iterator, NamedTuple, Optional

from mmdevplug.accelerators import device_context
from mmdevplug.device_guard.stack_location import LIBRARIES
from mmdevplug.errors import DevPlugError, ModelError, first_line

from .cuda_settings import describe_serious
from .versions import chain

#: Errors of PyTorch that was built without CUDA, or finds no card or no driver.
_CUDA = re.compile(
    r'not compiled with CUDA|re-initialize CUDA|without ATen_cuda|requires CUDA support'
    r'|NVIDIA driver|CUDA driver|No CUDA GPUs|no CUDA-capable'
    r"|torch\.cuda\.\w+ not available|attribute '_cuda_\w+|on a CUDA device but"
    r'|dummy base class (CUDA|Stream|Event)'
)
#: Errors of mmcv whose operator has no kernel for a device.
_NO_KERNEL = re.compile(r'(\w+?)(?:_impl)?: implementation for device (\S+) not found')

_MOVE = (
    'Write `x.to(other.device)`, where `other` is an input or a parameter of the module; a tensor '
    'that the module owns belongs in register_buffer() and moves with it'
)
_MAKE = 'Write `other.new_zeros(...)`, or `device=other.device`, where `other` is an input'
_BUILD = (
    'Leave it on the host and without a device: the runner moves the model when it is built, and '
    'what register_buffer() holds with it'
)
_ASK = (
    'Write `accelerator, device = mmdevplug.rank_device()` and then, for example, '
    '`accelerator.synchronize(device)`, or leave it out: the runner has chosen the device'
)
#: A line of a traceback in the text of an error from a worker process of a data loader.
_IN_TEXT = re.compile(r'^\s*File "([^"]+)", line (\d+), in (\S+)$', re.MULTILINE)
_INSTALLED = re.compile(r'[/\\](?:site|dist)-packages[/\\]([^/\\]+)')
#: Pattern of a line, and what to write instead; the first that matches counts.
_ADVICE = (
    (r'load\w*\(', "Write `map_location='cpu'`: what is loaded is copied to the device later"),
    (r'\bcuda\.\w*Tensor\b', f'{_MAKE}; `x.type()` of a CUDA type is `x.to(other)`'),
    (r'\.cuda\(|\.to\(', _MOVE),
    (r'device\s*=', _MAKE),
    (r'\bcuda\.', _ASK),
)


class Place(NamedTuple):
    """A line of code: file, number, function, and the text, empty where there is no source."""

    file: str
    line: int
    function: str
    code: str

    @property
    def package(self) -> Optional[str]:
        """The installed package that it belongs to; None for a file of the user's own."""
        found = _INSTALLED.search(self.file)
        return found.group(1) if found else None

    def describe(self) -> str:
        """The place and the line, for a message."""
        quoted = f': `{self.code}`' if self.code else ''
        return f'{self.file}:{self.line} (in {self.function}){quoted}'


@contextmanager
def explain_cuda(stage: str, cfg: Any = None) -> Iterator[None]:
    """Replace an error of code that asks for CUDA by a ``ModelError``: where, and what to write.

    It does nothing if the run computes on CUDA. Settings of ``cfg`` for CUDA are named, too.
    """
    try:
        yield
    except DevPlugError:
        raise
    except Exception as error:
        message = _explain(error, stage, cfg)
        if message is None:
            raise
        raise ModelError(message) from error


def _explain(error: Exception, stage: str, cfg: Any) -> Optional[str]:
    context = device_context()
    if context is None or context.device.type == 'cuda':
        return None
    for each in reversed(chain(error)):
        lines = str(each).splitlines()
        missing = _NO_KERNEL.search(str(each))
        about_cuda = [line.strip() for line in lines if _CUDA.search(line)]
        if missing or about_cuda:
            break
    else:
        return None
    place = user_place(error)
    settings = describe_serious(cfg or {}, context.device.type)
    if place is None and not settings:
        return None
    # The last line: a worker process of a data loader sends its whole traceback.
    text = first_line(each) if missing else about_cuda[-1][:300]
    parts = [f'rank {context.env.rank}, {stage}: {type(each).__name__}: {text}']
    if place is not None and missing:
        parts.append(
            f"{place.describe()}: mmcv's operator {missing.group(1)!r} has no kernel for "
            f'{missing.group(2)}. Choose a part of the model that does without it; `mmdevplug '
            f'doctor --config CONFIG` names the key where the config asks for it.'
        )
    elif place is not None:
        parts.append(
            f'{place.describe()}: this line asks for CUDA, but this run computes on '
            f'{context.device}. {_advice(place, stage)}.'
        )
        if place.package is not None:
            parts[-1] += (
                f' The line belongs to the package {place.package!r}: override that method in a '
                f'class of your own and name it in the config.'
            )
    return '\n'.join(parts + [f'In the config: {setting}.' for setting in settings])


def _advice(place: Place, stage: str) -> str:
    building = 'building' in stage or place.function.endswith('__init__')
    for pattern, advice in _ADVICE:
        if re.search(pattern, place.code):
            return _BUILD if building and advice in (_MOVE, _MAKE) else advice
    return _BUILD if building else _MOVE


# the line of the user --------------------------------------------------------------------------


def user_place(error: BaseException) -> Optional[Place]:
    """Find the innermost line outside PyTorch, MMEngine, this package and Python's own library.

    Errors that it was raised from come first; a traceback in the text of an error, from a worker
    process of a data loader, counts too. None if only libraries took part.
    """
    for each in reversed(chain(error)):
        frames = [
            # Python 3.11 knows the class, too.
            (code.co_filename, line, getattr(code, 'co_qualname', code.co_name))
            for code, line in ((f.f_code, n) for f, n in traceback.walk_tb(each.__traceback__))
        ]
        frames += [(file, int(line), name) for file, line, name in _IN_TEXT.findall(str(each))]
        for file, line, function in reversed(frames):
            if not is_library(file):
                return Place(file, line, function, linecache.getline(file, line).strip())
    return None


def is_library(file: str) -> bool:
    """Whether a file belongs to PyTorch, MMEngine, this package or Python, but not an example."""
    if file.startswith('<'):
        return True  # importlib and generated code
    paths = [getattr(sys.modules.get(name), '__path__', None) for name in LIBRARIES]
    if file.startswith(tuple(os.path.join(list(path)[0], '') for path in paths if path)):
        # The examples of this package count as a user's code.
        return os.path.join('mmdevplug', 'examples', '') not in file
    of_python = file.startswith(os.path.join(sysconfig.get_paths()['stdlib'], ''))
    return of_python and not _INSTALLED.search(file)
