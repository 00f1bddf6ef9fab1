"""Find the line of a user's own code that an error comes from."""

import linecache
import os
import re
import sys
import sysconfig
import traceback
from typing import List, NamedTuple, Optional

from mmdevplug.device_guard.stack_location import LIBRARIES

#: A line of a traceback in the text of an error from a worker process of a data loader.
_IN_TEXT = re.compile(r'^\s*File "([^"]+)", line (\d+), in (\S+)$', re.MULTILINE)
_INSTALLED = re.compile(r'[/\\](?:site|dist)-packages[/\\]([^/\\]+)')


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
            if not _is_library(file):
                return Place(file, line, function, linecache.getline(file, line).strip())
    return None


def chain(error: BaseException) -> List[BaseException]:
    """List an error and those that it was raised from, the outermost first."""
    found: List[BaseException] = []
    each: Optional[BaseException] = error
    while each is not None and each not in found:
        found.append(each)
        each = each.__cause__ or each.__context__
    return found


def _is_library(file: str) -> bool:
    if file.startswith('<'):
        return True  # importlib and generated code
    paths = [getattr(sys.modules.get(name), '__path__', None) for name in LIBRARIES]
    if file.startswith(tuple(os.path.join(list(path)[0], '') for path in paths if path)):
        # The examples of this package count as a user's code.
        return os.path.join('mmdevplug', 'examples', '') not in file
    of_python = file.startswith(os.path.join(sysconfig.get_paths()['stdlib'], ''))
    return of_python and not _INSTALLED.search(file)
