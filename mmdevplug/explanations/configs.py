"""Explain in one line why a config cannot be read: which file and line, and what to do."""

import ast
import sys
import traceback
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Iterator, List, Optional, Tuple

from mmdevplug.errors import DevPlugError, first_line

from .versions import explain_import

#: Calls outside of functions that a config has no use for, and that would run while it is read.
_CALLS = ('main', 'train', 'fit', 'backward', 'parse_args', 'from_cfg', 'init_process_group')


@contextmanager
def explain_config(path: str) -> Iterator[None]:
    """Replace an error of reading a config by one that names file, line and reason."""
    try:
        refuse_script(path)
        yield
    except DevPlugError:
        raise
    except Exception as error:
        # A config runs code: it, its bases and what it imports raise errors of any kind.
        if explain_import(error):
            raise  # for explain_versions
        cause = _cause(error)
        place, missing = place_in_config(path, cause), _missing_file(cause)
        if missing is not None:
            raise DevPlugError(
                f'CONFIG {path!r} cannot be read: {missing[0]} inherits {missing[1]}, which is no '
                f'file{_similar(missing[1])} Correct its _base_.'
            ) from error
        said, remedy = f'{type(cause).__name__}: {first_line(cause)}', 'Correct what it names'
        if isinstance(cause, SyntaxError):
            said, remedy = cause.msg, 'Expected Python; correct that line'
        elif isinstance(cause, ModuleNotFoundError):
            remedy = f'Install what is missing for {sys.executable}, or correct the name'
        raise DevPlugError(
            f'CONFIG {path!r} cannot be read: {place}: {said.rstrip(".!")}. {remedy}.'
        ) from error


def _cause(error: BaseException) -> BaseException:
    """The import error that MMEngine replaced by another, or else the error."""
    while isinstance(error, ImportError):
        below = error.__cause__ or error.__context__
        if below is None:
            break
        error = below
    return error


def _files(error: BaseException) -> List[str]:
    """The configs that were being read, each inherited by the one before it."""
    own = sys.modules['mmengine.config.config'].__file__
    names = ('_file2dict', '_parse_lazy_import', '_is_lazy_import')
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    found = [
        str(frame.f_locals['filename'])
        for frame in frames
        if frame.f_code.co_filename == own and frame.f_code.co_name in names
    ]
    return list(dict.fromkeys(found))


def _missing_file(error: BaseException) -> Optional[Tuple[str, str]]:
    """The file that is not there, as the last of the configs, and the one that inherits it."""
    files = _files(error)
    if not isinstance(error, FileNotFoundError) or len(files) < 2 or Path(files[-1]).is_file():
        return None
    return files[-2], str(Path(files[-1]).absolute())


def _similar(path: str) -> str:
    """The end of a sentence about a path without a file, with the nearest in the same folder."""
    place = Path(path)
    beside = [each.name for each in place.parent.glob('*')] if place.parent.is_dir() else []
    close = get_close_matches(place.name, beside, n=1)
    return f'; did you mean {close[0]!r}?' if close else '.'


def place_in_config(path: str, error: BaseException) -> str:
    """Name the file and line of a config that an error comes from; at least its path."""
    files = [path, *_files(error)]
    if isinstance(error, SyntaxError) and error.lineno is not None:
        named = error.filename if Path(str(error.filename)).is_file() else files[-1]
        return f'{named}:{error.lineno}'
    place = files[-1]
    for frame, line in traceback.walk_tb(error.__traceback__):
        # A config, or a module that one of its imports runs.
        if frame.f_code.co_name == '<module>' or frame.f_code.co_filename in files:
            place = f'{frame.f_code.co_filename}:{line}'
    return place


# scripts ----------------------------------------------------------------------------------------


def refuse_script(path: str) -> None:
    """Refuse a training script in place of a config, before reading it would run it."""
    place = Path(path)
    if place.suffix != '.py' or not place.is_file():
        return
    text = place.read_text(encoding='utf-8')
    line = next(_script_lines(ast.parse(text, path)), None)
    if line is not None:
        raise DevPlugError(
            f'CONFIG {path!r} is a script, no config: line {line} is '
            f'{text.splitlines()[line - 1].strip()!r}. Give the config that it trains; or start '
            f'it itself: python {path}, in several processes torchrun --nproc_per_node N {path}'
        )


def _script_lines(node: ast.AST) -> Iterator[int]:
    """Yield lines outside of functions and classes that only scripts have."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            continue
        if isinstance(child, ast.If):
            names = [one.id for one in ast.walk(child.test) if isinstance(one, ast.Name)]
            if '__name__' in names:
                yield child.lineno
        if isinstance(child, ast.Call):
            called = getattr(child.func, 'id', getattr(child.func, 'attr', None))
            if called in _CALLS:
                yield child.lineno
        yield from _script_lines(child)
