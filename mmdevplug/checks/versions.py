"""Section *versions*: what is installed, what does not go together, what cannot be imported.

OpenMMLab's packages check each other's versions with an ``assert`` when they are imported,
somewhere inside whatever imported them: :func:`explain_versions` says what to type instead.
"""

import glob
import platform
import re
import sys
import traceback
from contextlib import contextmanager, suppress
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence

from mmdevplug.errors import DevPlugError, chain, first_line

from .findings import Finding, Section
from .isolated import run_isolated

section = Section('versions')
IMPORT_SECONDS = 120.0

#: Modules that are tried: what this plugin needs comes first.
REQUIRED = ('torch', 'numpy', 'mmengine')
OTHERS = (
    *('torchvision', 'torch_xla', 'mmcv', 'mmcv.ops', 'mmdet', 'mmseg', 'mmpretrain', 'mmpose'),
    *('mmaction', 'mmdet3d', 'mmocr', 'mmrotate', 'mmyolo', 'mmagic'),
)
#: Modules whose import needs no torch.
_WITHOUT_TORCH = ('numpy', 'mmengine')
#: What they say of a version that they do not accept.
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


def examine() -> Iterator[Finding]:
    """Import each library in a process of its own."""
    names = modules_to_try()
    packages = [name for name in map(distribution, names) if name is not None]
    installed = {'python': platform.python_version()}
    installed.update((name, metadata.version(name)) for name in packages)
    listed = ', '.join(f'{name} {version}' for name, version in installed.items())
    yield section.ok(f'installed: {listed}')
    for package in REQUIRED:
        if package not in names:
            yield section.error(
                f'{package} is not installed for {sys.executable}',
                'nothing can be trained without it.',
                # Vendors of accelerators ship a torch for them.
                "install the torch of the accelerator's vendor"
                if package == 'torch'
                else f'pip install {package}',
            )
    broken = False
    for finding in run_isolated(__name__, names[:1], {}, IMPORT_SECONDS):
        broken |= finding.level == 'error'
        yield finding
    # All others import torch, and would only repeat that it fails.
    rest = [name for name in names[1:] if not broken or name in _WITHOUT_TORCH]
    yield from run_isolated(__name__, rest, {}, IMPORT_SECONDS)


def modules_to_try() -> List[str]:
    """List installed modules; those of vendors belong to the section *accelerators*."""
    return [name for name in (*REQUIRED, *OTHERS) if find_spec(name.split('.')[0]) is not None]


def work(task: str, options: Dict[str, Any], say: Callable[[str], None]) -> Iterator[Finding]:
    """Import one module; see :mod:`mmdevplug.checks.isolated`."""
    say(f'import {task}')
    try:
        import_module(task)
    except Exception as error:
        # Compiled libraries fail in many ways.
        found, problem = f'import {task} fails with {type(error).__name__}: {error}', None
        if task != 'torch':
            problem = explain_import(error)
        elif error.__cause__ is not None:  # of a vendor's package, which PyTorch imports itself
            cause = error.__cause__
            found += f' Its cause: {type(cause).__name__}: {first_line(cause)}'
        if problem is None:
            yield _broken(task, found)
        else:
            why = f'whatever imports {task} fails.'
            yield section.error(f'{found}. {problem.what}', why, problem.command)
        return
    yield section.ok(f'import {task} works')


def _broken(module: str, found: str) -> Finding:
    why = f'{module} is installed but broken: whatever imports it fails.'
    if module == 'mmcv.ops':
        return section.error(found, why, install_command('mmcv'))
    package = distribution(module) or module
    again = f'--force-reinstall --no-deps {package}=={installed_version(module) or "VERSION"}'
    return section.error(
        found,
        why,
        f'{sys.executable} -c "import {module}"  # then repair what it names, or: '
        f'pip install {again}',
    )


# errors of other packages -----------------------------------------------------------------------


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
    """What to type for versions of a package; of mmcv for those that OpenMMLab's accept."""
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
