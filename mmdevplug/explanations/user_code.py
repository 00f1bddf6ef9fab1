"""Find the line of a user's own code that an error comes from."""

import linecache
import os
import re
import sys
import sysconfig
import traceback
from typing import Iterator, List, NamedTuple, Optional, Tuple

from mmdevplug.device_guard.stack_location import LIBRARIES

#: A line of a traceback in the text of an error that a worker process of a data loader met.
_IN_TEXT = re.compile(r'^\s*File "([^"]+)", line (\d+), in (\S+)$', re.MULTILINE)
_INSTALLED = re.compile(r'[/\\](?:site|dist)-packages[/\\]([^/\\]+)')


class Place(NamedTuple):
    """A line of somebody's code.

    Attributes:
        file (str): Its path.
        line (int): Its number.
        function (str): The function that it is in.
        code (str): The line itself, empty where there is no source.
    """

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
    """The innermost line outside PyTorch, MMEngine, this package and Python's own library.

    Args:
        error (BaseException): As caught; errors that it was raised from are looked at first, and
            so is the traceback that a worker process of a data loader has sent as text.

    Returns:
        Place or None: None if only libraries took part.
    """
    libraries = _library_folders()
    for each in reversed(chain(error)):
        for file, line, function in reversed(list(_frames(each))):
            if not _is_library(file, libraries):
                return Place(file, line, function, linecache.getline(file, line).strip())
    return None


def chain(error: BaseException) -> List[BaseException]:
    """An error and those that it was raised from, the outermost first."""
    found: List[BaseException] = []
    each: Optional[BaseException] = error
    while each is not None and each not in found:
        found.append(each)
        each = each.__cause__ or each.__context__
    return found


def _frames(error: BaseException) -> Iterator[Tuple[str, int, str]]:
    for frame, line in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        # Python 3.11 knows the class, too.
        yield code.co_filename, line, getattr(code, 'co_qualname', code.co_name)
    for file, number, function in _IN_TEXT.findall(str(error)):
        yield file, int(number), function


def _library_folders() -> Tuple[str, ...]:
    paths = [getattr(sys.modules.get(name), '__path__', None) for name in sorted(LIBRARIES)]
    return tuple(os.path.join(list(path)[0], '') for path in paths if path)


def _is_library(file: str, libraries: Tuple[str, ...]) -> bool:
    if file.startswith('<'):
        return True  # importlib and what is generated
    if file.startswith(libraries):
        # What this package teaches by is a user's code.
        return os.path.join('mmdevplug', 'examples', '') not in file
    of_python = file.startswith(os.path.join(sysconfig.get_paths()['stdlib'], ''))
    return of_python and not _INSTALLED.search(file)
