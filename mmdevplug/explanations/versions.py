"""OpenMMLab's packages that do not go together: which, what is expected, and what to type.

They check each other with an ``assert`` when they are imported, somewhere inside whatever imported
them. The ranges are read from the packages themselves, without running them.
"""

import ast
import glob
import re
import sys
import traceback
from contextlib import contextmanager
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Dict, Iterator, List, NamedTuple, Optional

from mmdevplug.errors import DevPlugError, first_line

#: ``mmcv_minimum_version`` in most of them, ``MMCV_MIN`` in mmseg.
_BOUND = re.compile(r'^(mm\w+?)_(min|max)(?:imum_version)?$', re.IGNORECASE)
#: The module of mmcv's compiled operators, or its file.
_OPERATORS = re.compile(r'mmcv(\.|[/\\])_ext\b')
_NOT_FOUND = re.compile(r'is not in the |scope|Failed to (?:get|import)')

#: Names on the package index where they are not those of the modules.
PACKAGES = {'mmseg': 'mmsegmentation', 'mmaction': 'mmaction2'}


class Range(NamedTuple):
    """Versions that a package accepts of another.

    Attributes:
        minimum (str, optional): The lowest.
        maximum (str, optional): Where it ends.
        inclusive (bool): Whether ``maximum`` itself is accepted.
    """

    minimum: Optional[str] = None
    maximum: Optional[str] = None
    inclusive: bool = False

    def describe(self) -> str:
        """As pip takes it, e.g. ``'>=2.0.0rc4,<2.2.0'``."""
        end = '<=' if self.inclusive else '<'
        parts = [f'>={self.minimum}'] if self.minimum else []
        return ','.join(parts + ([f'{end}{self.maximum}'] if self.maximum else []))

    def accepts(self, version: str) -> bool:
        """Whether a version is inside; compared as these packages do it."""
        from mmengine.utils import digit_version

        found = digit_version(version)
        if self.minimum and found < digit_version(self.minimum):
            return False
        if not self.maximum:
            return True
        end = digit_version(self.maximum)
        return found <= end if self.inclusive else found < end


class Problem(NamedTuple):
    """Packages that do not fit.

    Attributes:
        what (str): What was found and what is expected.
        command (str): What to type.
    """

    what: str
    command: str

    def describe(self) -> str:
        """Both, for a message."""
        return f'{self.what}. Type: {self.command}'


def required_ranges(module: str) -> Dict[str, Range]:
    """What an installed package wants of others, read from its text.

    Args:
        module (str): E.g. ``'mmdet'``.

    Returns:
        dict: By module, e.g. ``{'mmcv': Range('2.0.0rc4', '2.2.0')}``; empty if it says nothing.
    """
    spec = find_spec(module)
    if spec is None or spec.origin is None or not spec.origin.endswith('.py'):
        return {}
    try:
        tree = ast.parse(Path(spec.origin).read_text(encoding='utf-8'))
    except (OSError, SyntaxError):
        return {}  # whoever imports it is told
    found: Dict[str, Dict[str, str]] = {}
    for node in tree.body:
        if not (isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)):
            continue
        bound, value = _BOUND.match(node.targets[0].id), node.value
        if bound and isinstance(value, ast.Constant):
            key = 'minimum' if bound.group(2).lower() == 'min' else 'maximum'
            found.setdefault(bound.group(1).lower(), {})[key] = value.value
    inclusive = _inclusive(tree)
    return {
        name: Range(inclusive=name in inclusive, **bounds)
        for name, bounds in found.items()
        if name != module
    }


def _inclusive(tree: ast.Module) -> List[str]:
    """The packages whose maximum an assertion compares with ``<=``."""
    found = []
    for check in [node for node in ast.walk(tree) if isinstance(node, ast.Assert)]:
        for compare in [node for node in ast.walk(check.test) if isinstance(node, ast.Compare)]:
            names = {n.id.lower() for n in ast.walk(compare.comparators[-1]) if _is_name(n)}
            for name in names:
                bound = re.match(r'(mm\w+?)_max', name)
                if bound and isinstance(compare.ops[-1], ast.LtE):
                    found.append(bound.group(1))
    return found


def _is_name(node: ast.AST) -> bool:
    return isinstance(node, ast.Name)


def installed_version(module: str) -> Optional[str]:
    """The version of what is or would be imported under a name; None if that is not known."""
    loaded = getattr(sys.modules.get(module), '__version__', None)
    if isinstance(loaded, str):
        return loaded
    for package in (PACKAGES.get(module, module), f'{module}-lite', f'{module}-full'):
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return None


def conflicts(module: str) -> Iterator[Problem]:
    """What an installed package refuses of the others that are installed.

    Args:
        module (str): E.g. ``'mmdet'``.
    """
    for other, wanted in required_ranges(module).items():
        version = installed_version(other)
        if version is None:
            yield Problem(
                f'{_named(module)} needs {other} {wanted.describe()}, which is not installed for '
                f'{sys.executable}',
                install_command(other, wanted),
            )
        elif not wanted.accepts(version):
            yield Problem(
                f'{_named(module)} needs {other} {wanted.describe()}, but {other} {version} is '
                f'installed ({_folder(other)})',
                install_command(other, wanted),
            )


def install_command(module: str, wanted: Optional[Range] = None) -> str:
    """What to type to get a version that is accepted.

    Args:
        module (str): What is missing or wrong.
        wanted (Range, optional): Defaults to None: mmcv's versions that OpenMMLab's packages take.
    """
    spec = '>=2.0.0,<2.2.0' if wanted is None else wanted.describe()
    if module != 'mmcv':
        return f'pip install "{PACKAGES.get(module, module)}{spec}"'
    # Compiled for the torch that is there, which a vendor may have made.
    return (
        f'MMCV_WITH_OPS=1 pip install --no-build-isolation --no-binary mmcv --force-reinstall '
        f'--no-deps "mmcv{spec}"'
    )


def _named(module: str) -> str:
    return f'{PACKAGES.get(module, module)} {installed_version(module) or ""}'.strip()


def _folder(module: str) -> str:
    spec = find_spec(module)
    return str(Path(spec.origin).parent) if spec is not None and spec.origin else 'nowhere'


# errors -----------------------------------------------------------------------------------------


@contextmanager
def explain_versions() -> Iterator[None]:
    """Turn an import that fails because of versions into an error that names them.

    Raises:
        DevPlugError: In place of an ``AssertionError`` or an ``ImportError`` of these packages.
    """
    try:
        yield
    except DevPlugError:
        raise
    except (AssertionError, ImportError, KeyError) as error:
        problems = explain_import(error)
        if not problems:
            raise
        raise DevPlugError('\n'.join(each.describe() for each in problems)) from error


def explain_import(error: BaseException) -> List[Problem]:
    """Say what is wrong if versions are the reason of an error.

    Args:
        error (BaseException): As caught; what it was raised from is looked at, too.

    Returns:
        List[Problem]: Empty if versions are not the reason.
    """
    each: Optional[BaseException] = error
    while each is not None:
        if isinstance(each, ImportError) and _OPERATORS.search(f'{each.name} {each.path} {each}'):
            return [_operators(each)]
        if isinstance(each, (AssertionError, ModuleNotFoundError)):
            found = [told for module in _importing(each) for told in conflicts(module)]
            if found:
                return list(dict.fromkeys(found))
        if isinstance(each, KeyError) and _NOT_FOUND.search(str(each)):
            return _unregistered(str(each))
        each = each.__cause__ or each.__context__
    return []


def _importing(error: BaseException) -> List[str]:
    """The packages whose ``__init__`` an error went through, the innermost first."""
    found = []
    for frame, _ in traceback.walk_tb(error.__traceback__):
        name = frame.f_globals.get('__name__') or ''
        if frame.f_code.co_name == '<module>' and name.startswith('mm') and '.' not in name:
            found.append(name)
    return found[::-1]


def _operators(error: ImportError) -> Problem:
    """mmcv's compiled operators: not there, or compiled for something else."""
    import torch

    folder = _folder('mmcv')
    files = glob.glob(f'{folder}/_ext*.so') + glob.glob(f'{folder}/_ext*.pyd')
    here = f'torch {torch.__version__} and Python {sys.version_info[0]}.{sys.version_info[1]}'
    if files:
        what = f'the compiled operators of {_named("mmcv")} ({files[0]}) are not for {here}'
    else:
        what = (
            f'{_named("mmcv")} ({folder}) has no operators (mmcv._ext) compiled for {here}, which '
            f'what is imported needs'
        )
    return Problem(f'{what}: {first_line(error)}', install_command('mmcv'))


def _unregistered(text: str) -> List[Problem]:
    """MMEngine passes over a package that it cannot import, and then knows none of its names."""
    for scope in dict.fromkeys(re.findall(r'\b(mm[a-z0-9]+)\b', text)):
        if scope in ('mmengine', 'mmdevplug') or find_spec(scope) is None:
            continue
        try:
            import_module(f'{scope}.registry')
        except (AssertionError, ImportError) as error:
            return list(conflicts(scope)) or explain_import(error)
    return []
