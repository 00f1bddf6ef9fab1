"""Explain why a package cannot be imported, and say what to type.

OpenMMLab's packages check each other's versions with an ``assert`` when they are imported,
somewhere inside whatever imported them: :func:`explain_versions` says what to type instead.
"""

import glob
import re
import sys
import traceback
from contextlib import contextmanager, suppress
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Iterator, NamedTuple, Optional, Sequence

from mmdevplug.errors import DevPlugError, chain, first_line

#: The message of an OpenMMLab package that refuses a version of another.
_REFUSED = re.compile(
    r'\w+==(\S+) is used but incompatible\..*?install (\w+?)([<>=].+?)\.?\s*$', re.S
)
#: The module of mmcv's compiled operators, or its file.
_OPERATORS = re.compile(r'mmcv(\.|[/\\])_ext\b')
_NOT_FOUND = re.compile(r'is not in the |scope|Failed to (?:get|import)')

#: Names on the package index where they are not those of the modules.
PACKAGES = {'mmseg': 'mmsegmentation', 'mmaction': 'mmaction2'}
#: The releases of mmcv that OpenMMLab's packages accept.
_MMCV = '>=2.0.0,<2.2.0'


class Problem(NamedTuple):
    """A package that cannot be imported: what was found and expected, and what to type."""

    what: str
    command: str

    def __str__(self) -> str:
        return f'{self.what}. Type: {self.command}'


def distribution(module: str) -> Optional[str]:
    """The installed package of a module, which may be OneDL's; None if there is none."""
    usual = PACKAGES.get(module, module)
    for package in (usual, f'{module}-lite', f'{module}-full', f'onedl-{usual}'):
        with suppress(metadata.PackageNotFoundError):
            metadata.version(package)
            return package
    return None


def installed_version(module: str) -> Optional[str]:
    """The version of what is or would be imported under a name; None if that is not known."""
    loaded = getattr(sys.modules.get(module), '__version__', None)
    if isinstance(loaded, str):
        return loaded
    package = distribution(module)
    return None if package is None else metadata.version(package)


def folder_of(module: str) -> Optional[str]:
    """The folder of a module that can be imported."""
    spec = find_spec(module)
    return None if spec is None or spec.origin is None else str(Path(spec.origin).parent)


def install_command(module: str, versions: str = '') -> str:
    """The command that installs versions of a package; for mmcv those that OpenMMLab accepts."""
    package = distribution(module) or PACKAGES.get(module, module)
    if module != 'mmcv':
        return f'pip install "{package}{versions}"'
    package = package if package.startswith('onedl') else module
    if '<' not in versions:
        versions = _MMCV if package == module else ''
    # Compiled for the installed torch, which may be a vendor's.
    return (
        f'MMCV_WITH_OPS=1 pip install --no-build-isolation --no-binary {package} '
        f'--force-reinstall --no-deps "{package}{versions}"'
    )


def _named(module: str) -> str:
    package = distribution(module) or PACKAGES.get(module, module)
    return f'{package} {installed_version(module) or ""}'.strip()


@contextmanager
def explain_versions() -> Iterator[None]:
    """Replace an import error of an OpenMMLab package by a ``DevPlugError`` with a remedy."""
    try:
        yield
    except DevPlugError:
        raise
    except Exception as error:
        # A package that cannot be imported raises errors of any kind.
        problem = explain_import(error)
        if problem is None:
            raise
        raise DevPlugError(str(problem)) from error


def explain_import(error: BaseException, unknown: bool = True) -> Optional[Problem]:
    """Find the package whose import is the reason of an error or of what it was raised from.

    With ``unknown``, also of names that a registry does not know.
    """
    for each in chain(error):
        frames = [frame for frame, _ in traceback.walk_tb(each.__traceback__)]
        if isinstance(each, ImportError) and _OPERATORS.search(f'{each.name} {each.path} {each}'):
            return _operators(each)
        problem = _needed(each, frames)
        if problem is not None:
            return problem
        # The modules that MMEngine's registries were importing, the innermost last.
        held = [one.f_locals for one in frames if one.f_code.co_name == 'import_from_location']
        if held:
            return _failed_import(str(held[-1].get('loc', held[-1]['self'].scope)), each)
        if unknown and isinstance(each, KeyError) and _NOT_FOUND.search(str(each)):
            scopes = [one.f_locals.get('scope') for one in frames]
            scopes = [one for one in scopes if isinstance(one, str)]
            return _broken_package(*re.findall(r'\b(mm[a-z0-9]+)\b', str(each)), *scopes)
    return None


def _needed(error: BaseException, frames: Sequence[FrameType]) -> Optional[Problem]:
    """Describe the version, or the missing package, that stopped the import of another."""
    running = [one.f_globals.get('__name__') for one in frames if one.f_code.co_name == '<module>']
    packages = [str(name) for name in running if re.fullmatch(r'mm(?!devplug)\w+', str(name))]
    if not packages:
        return None
    package = _named(packages[-1])
    refused = _REFUSED.search(str(error)) if isinstance(error, AssertionError) else None
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if refused is not None:
        version, name, versions = refused.groups()
        versions = versions.replace(' ', '')
        place = folder_of(name) or 'nowhere'
        what = f'{package} needs {name} {versions}, but {name} {version} is installed ({place})'
        return Problem(what, install_command(name, versions))
    if missing is not None and re.fullmatch(r'mm\w+', missing):
        what = f'{package} needs {missing}, which is not installed for {sys.executable}'
        return Problem(what, install_command(missing))
    return None


def _failed_import(module: str, error: BaseException) -> Problem:
    """Describe a package that is installed and cannot be imported: the error, and where."""
    scope = module.partition('.')[0]
    place = [
        f'{frame.f_code.co_filename}:{line}: '
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_name == '<module>'
    ]
    said = first_line(error).rstrip('.')
    what = (
        f'{_named(scope)} cannot be imported, so none of its names is known: '
        f'{place[-1] if place else ""}{type(error).__name__}: {said}'
    )
    return Problem(what, f'{sys.executable} -c "import {module}"  # then install what it names')


def _operators(error: ImportError) -> Problem:
    """Describe mmcv's compiled operators: missing, or compiled for another PyTorch or Python."""
    import torch

    folder = folder_of('mmcv') or 'nowhere'
    files = glob.glob(f'{folder}/_ext*.so') + glob.glob(f'{folder}/_ext*.pyd')
    here = f'torch {torch.__version__} and Python {sys.version_info[0]}.{sys.version_info[1]}'
    if files:
        what = f'the compiled operators of {_named("mmcv")} ({files[0]}) are not for {here}'
    else:
        what = (
            f'{_named("mmcv")} ({folder}) has no operators (mmcv._ext) compiled for {here}, but '
            f'the imported package needs them'
        )
    return Problem(f'{what}: {first_line(error)}', install_command('mmcv'))


def _broken_package(*scopes: Optional[str]) -> Optional[Problem]:
    """Find a package that MMEngine could not import, so that it knows none of its names.

    It looks for them in the default scope where they name none.
    """
    from mmengine.registry import DefaultScope

    default = DefaultScope.get_current_instance()
    for scope in dict.fromkeys((*scopes, default and default.scope_name)):
        if not scope or scope in ('mmengine', 'mmdevplug') or find_spec(scope) is None:
            continue
        try:
            import_module(f'{scope}.registry')
        except Exception as error:
            # It may fail in any way.
            return explain_import(error, unknown=False) or _failed_import(scope, error)
    return None
