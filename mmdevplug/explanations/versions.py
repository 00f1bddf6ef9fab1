"""Explain OpenMMLab packages that do not go together: which, what is expected, what to type.

They check each other with an ``assert`` when they are imported, somewhere inside whatever imported
them. The ranges are read from the packages themselves, without running them.
"""

import ast
import glob
import re
import sys
import traceback
from contextlib import contextmanager, suppress
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Dict, Iterator, List, NamedTuple, Optional, Sequence

from mmdevplug.errors import DevPlugError, first_line

#: ``mmcv_minimum_version`` in most of them, ``MMCV_MIN`` in mmseg.
_BOUND = re.compile(r'^(mm\w+?)_(min|max)(?:imum_version)?$', re.IGNORECASE)
#: The module of mmcv's compiled operators, or its file.
_OPERATORS = re.compile(r'mmcv(\.|[/\\])_ext\b')
_NOT_FOUND = re.compile(r'is not in the |scope|Failed to (?:get|import)')

#: Names on the package index where they are not those of the modules.
PACKAGES = {'mmseg': 'mmsegmentation', 'mmaction': 'mmaction2'}
#: The packages of OneDL's fork, each of which installs the same module as OpenMMLab's.
ONEDL = {
    'mmengine': 'onedl-mmengine',
    'mmcv': 'onedl-mmcv',
    'mmseg': 'onedl-mmsegmentation',
    'mmdet': 'onedl-mmdetection',
    'mmpretrain': 'onedl-mmpretrain',
    'mmrotate': 'onedl-mmrotate',
}


class Range(NamedTuple):
    """Versions that a package accepts of another."""

    minimum: Optional[str] = None
    maximum: Optional[str] = None
    inclusive: bool = False  # of the maximum

    def describe(self) -> str:
        """Write it as pip takes it, e.g. ``'>=2.0.0rc4,<2.2.0'``."""
        end = '<=' if self.inclusive else '<'
        parts = [f'>={self.minimum}'] if self.minimum else []
        return ','.join(parts + ([f'{end}{self.maximum}'] if self.maximum else []))

    def accepts(self, version: str) -> bool:
        """Compare a version as these packages do it."""
        from mmengine.utils import digit_version

        found = digit_version(version)
        if self.minimum and found < digit_version(self.minimum):
            return False
        if not self.maximum:
            return True
        end = digit_version(self.maximum)
        return found < end or (self.inclusive and found == end)


class Problem(NamedTuple):
    """Packages that do not fit: what was found and expected, and what to type."""

    what: str
    command: str


def required_ranges(module: str) -> Dict[str, Range]:
    """Read from the text of an installed package which versions of other modules it requires."""
    spec = find_spec(module)
    if spec is None or spec.origin is None or not spec.origin.endswith('.py'):
        return {}
    try:
        tree = ast.parse(Path(spec.origin).read_text(encoding='utf-8'))
    except (OSError, SyntaxError):
        return {}  # its import raises the error
    ranges: Dict[str, Range] = {}
    for node in tree.body:
        if not (isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)):
            continue
        bound = _BOUND.match(node.targets[0].id)
        if bound and bound.group(1).lower() != module and isinstance(node.value, ast.Constant):
            name, end = bound.group(1).lower(), f'{bound.group(2).lower()}imum'
            changed = {end: node.value.value, 'inclusive': name in _inclusive(tree)}
            ranges[name] = ranges.get(name, Range())._replace(**changed)
    return ranges


def _inclusive(tree: ast.Module) -> List[str]:
    """List the packages whose maximum an assertion compares with ``<=``."""
    asserts = [node for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    compares = [node for one in asserts for node in ast.walk(one) if isinstance(node, ast.Compare)]
    ends = [one.comparators[-1] for one in compares if isinstance(one.ops[-1], ast.LtE)]
    names = [node.id for end in ends for node in ast.walk(end) if isinstance(node, ast.Name)]
    bounds = [re.match(r'(mm\w+?)_max', name, re.IGNORECASE) for name in names]
    return [bound.group(1).lower() for bound in bounds if bound]


def installed_version(module: str) -> Optional[str]:
    """The version of what is or would be imported under a name; None if that is not known."""
    loaded = getattr(sys.modules.get(module), '__version__', None)
    if isinstance(loaded, str):
        return loaded
    package = distribution(module)
    return None if package is None else metadata.version(package)


def distribution(module: str) -> Optional[str]:
    """The installed package of a module, which may be OneDL's; None if there is none."""
    usual = (PACKAGES.get(module, module), f'{module}-lite', f'{module}-full')
    for package in (*usual, *([ONEDL[module]] if module in ONEDL else [])):
        with suppress(metadata.PackageNotFoundError):
            metadata.version(package)
            return package
    return None


def conflicts(module: str) -> Iterator[Problem]:
    """Compare what an installed package requires with what is installed."""
    for other, required in required_ranges(module).items():
        version = installed_version(other)
        if version is not None and required.accepts(version):
            continue
        name, spec = _named(module), required.describe()
        if version is None:
            what = f'{name} needs {other} {spec}, which is not installed for {sys.executable}'
        else:
            folder = folder_of(other) or 'nowhere'
            what = f'{name} needs {other} {spec}, but {other} {version} is installed ({folder})'
        yield Problem(what, _way_out(module, other, required))


def _way_out(module: str, other: str, required: Range) -> str:
    """What to type if a package does not take the installed version of another."""
    if distribution(other) != ONEDL.get(other, ''):
        return install_command(other, required)
    # The fork's packages require releases of the fork.
    package = distribution(module) or PACKAGES.get(module, module)
    if module in ONEDL:
        return f'pip uninstall -y {package} && pip install {ONEDL[module]}'
    return f'pip uninstall -y {ONEDL[other]} && {_install(other, required.describe())}'


def install_command(module: str, required: Optional[Range] = None) -> str:
    """What to type for an accepted version, by default of mmcv for OpenMMLab's packages."""
    if required is None and distribution(module) == ONEDL.get(module, ''):
        return _install(module, '', ONEDL[module])
    return _install(module, '>=2.0.0,<2.2.0' if required is None else required.describe())


def _install(module: str, spec: str, package: Optional[str] = None) -> str:
    package = package or PACKAGES.get(module, module)
    if module != 'mmcv':
        return f'pip install "{package}{spec}"'
    # Compiled for the installed torch, which may be a vendor's.
    return (
        f'MMCV_WITH_OPS=1 pip install --no-build-isolation --no-binary {package} '
        f'--force-reinstall --no-deps "{package}{spec}"'
    )


def _named(module: str) -> str:
    package = distribution(module)
    name = package if package == ONEDL.get(module, '') else PACKAGES.get(module, module)
    return f'{name} {installed_version(module) or ""}'.strip()


def folder_of(module: str) -> Optional[str]:
    """The folder of a module that can be imported."""
    spec = find_spec(module)
    return None if spec is None or spec.origin is None else str(Path(spec.origin).parent)


# errors -----------------------------------------------------------------------------------------


@contextmanager
def explain_versions() -> Iterator[None]:
    """Replace an import error that versions cause by a ``DevPlugError`` that names them."""
    try:
        yield
    except DevPlugError:
        raise
    except Exception as error:
        # A package that cannot be imported raises errors of any kind.
        problems = explain_import(error)
        if not problems:
            raise
        raise DevPlugError(describe(problems)) from error


def describe(problems: Sequence[Problem]) -> str:
    """One line for each problem."""
    return '\n'.join(f'{problem.what}. Type: {problem.command}' for problem in problems)


def explain_import(error: BaseException, unknown: bool = True) -> List[Problem]:
    """Find versions that are the reason of an error or of what it was raised from.

    With ``unknown``, also of names that a registry does not know.
    """
    for each in chain(error):
        if isinstance(each, ImportError) and _OPERATORS.search(f'{each.name} {each.path} {each}'):
            return [_operators(each)]
        if isinstance(each, (AssertionError, ModuleNotFoundError)):
            frames = [frame for frame, _ in traceback.walk_tb(each.__traceback__)]
            # The packages whose `__init__` it went through, the innermost first.
            names = [
                frame.f_globals.get('__name__') or ''
                for frame in reversed(frames)
                if frame.f_code.co_name == '<module>'
            ]
            modules = [name for name in names if name.startswith('mm') and '.' not in name]
            found = [problem for module in modules for problem in conflicts(module)]
            if found:
                return list(dict.fromkeys(found))
        modules = _importing(each)
        if modules:
            return [failed_import(modules[-1], each)]
        if unknown and isinstance(each, KeyError) and _NOT_FOUND.search(str(each)):
            held = [one.f_locals.get('scope') for one, _ in traceback.walk_tb(each.__traceback__)]
            scopes = [one for one in held if isinstance(one, str)]
            return broken_packages(*re.findall(r'\b(mm[a-z0-9]+)\b', str(each)), *scopes)
    return []


def _importing(error: BaseException) -> List[str]:
    """The modules that MMEngine's registries were importing, the innermost last."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    held = [one.f_locals for one in frames if one.f_code.co_name == 'import_from_location']
    return [str(one.get('loc', one['self'].scope)) for one in held]


def failed_import(module: str, error: BaseException) -> Problem:
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
    other = (getattr(error, 'name', None) or scope).partition('.')[0]
    if other != scope and installed_version(other) is not None:
        what += f' ({other} {installed_version(other)} is installed)'
    return Problem(what, f'{sys.executable} -c "import {module}"  # then install what it names')


def chain(error: BaseException) -> List[BaseException]:
    """List an error and those that it was raised from, the outermost first."""
    found: List[BaseException] = []
    each: Optional[BaseException] = error
    while each is not None and each not in found:
        found.append(each)
        each = each.__cause__ or each.__context__
    return found


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


def broken_packages(*scopes: Optional[str]) -> List[Problem]:
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
            found = list(conflicts(scope)) or explain_import(error, unknown=False)
            return found or [failed_import(scope, error)]
    return []
