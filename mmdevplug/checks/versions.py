"""Section *versions*: what is installed, what does not go together, what cannot be imported."""

import platform
import sys
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Callable, Iterator, List

from mmdevplug.errors import first_line
from mmdevplug.utils.broken_imports import (
    distribution,
    explain_import,
    folder_of,
    install_command,
    installed_version,
)

from .findings import Finding, Section
from .isolated import TaskOptions, run_isolated

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


def work(task: str, options: TaskOptions, say: Callable[[str], None]) -> Iterator[Finding]:
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
    package, imported = distribution(task), installed_version(task)
    # PyTorch's packages name their build after a plus, the metadata may not.
    if package is not None and imported is not None:
        installed = metadata.version(package)
        if imported.partition('+')[0] != installed.partition('+')[0]:
            yield section.note(
                f'import {task} finds version {imported} in {folder_of(task)}, before the '
                f'installed {package} {installed}'
            )


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
