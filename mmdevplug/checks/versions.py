"""Section *versions*: what is installed, which requirements are unmet, what cannot be imported."""

import platform
import re
import subprocess
import sys
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any, Callable, Dict, Iterator, List

from mmdevplug.errors import first_line
from mmdevplug.explanations.versions import (
    distribution,
    explain_import,
    install_command,
    installed_version,
)
from mmdevplug.utils.built_for import describe_torch_requirement

from .findings import Finding, Section
from .isolated import Death, run_isolated

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
#: Packages that PyTorch imports itself name a function in this group of entry points.
_AUTOLOADED = 'torch.backends'


def examine() -> Iterator[Finding]:
    """Ask pip what does not go together, and import each library in a process of its own."""
    names = modules_to_try()
    packages = [name for name in map(distribution, names) if name is not None]
    installed = {'python': platform.python_version()}
    installed.update((name, metadata.version(name)) for name in packages)
    listed = ', '.join(f'{name} {version}' for name, version in installed.items())
    yield section.ok(f'installed: {listed}', data=dict(installed))
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
    yield from _unmet_requirements()
    broken = False
    for found in run_isolated(__name__, names[:1], {}, IMPORT_SECONDS):
        finding = _broken(found.task, found.describe()) if isinstance(found, Death) else found
        broken |= finding.level == 'error'
        yield finding
    # All others import torch, and would only repeat that it fails.
    rest = [name for name in names[1:] if not broken or name in _WITHOUT_TORCH]
    for found in run_isolated(__name__, rest, {}, IMPORT_SECONDS):
        yield _broken(found.task, found.describe()) if isinstance(found, Death) else found


def modules_to_try() -> List[str]:
    """List installed modules; those of vendors belong to the section *accelerators*."""
    return [name for name in (*REQUIRED, *OTHERS) if find_spec(name.split('.')[0]) is not None]


def _unmet_requirements() -> Iterator[Finding]:
    """Report what ``pip check`` finds."""
    command = [sys.executable, '-m', 'pip', 'check', '--disable-pip-version-check']
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode not in (0, 1) or 'No module named pip' in done.stderr:
        yield section.note(f'requirements were not compared: {first_line(done.stderr)}')
    elif done.returncode:
        for line in done.stdout.splitlines():
            yield section.warning(
                f'pip check: {line}',
                'packages that do not go together fail when they are imported, or later.',
                'install what the package asks for, or another release of it',
            )
    else:
        yield section.ok('pip check: no requirement of an installed package is unmet')


def work(task: str, options: Dict[str, Any], say: Callable[[str], None]) -> Iterator[Finding]:
    """Import one module; see :mod:`mmdevplug.checks.isolated`."""
    say(f'import {task}')
    try:
        import_module(task)
    except Exception as error:
        # Compiled libraries fail in many ways.
        found, problem = f'import {task} fails with {type(error).__name__}: {error}', None
        if task == 'torch' and error.__cause__ is not None:
            yield _broken_extension(error, error.__cause__)
            return
        if task != 'torch':
            problem = explain_import(error)
        if problem is None:
            yield _broken(task, found)
        else:
            why = f'whatever imports {task} fails.'
            yield section.error(f'{found}. {problem.what}', why, problem.command)
        return
    yield section.ok(f'import {task} works')


def _broken_extension(error: Exception, cause: BaseException) -> Finding:
    """Name the vendor's package whose entry point keeps torch from being imported."""
    named = re.search(r'backend extension: (\S+?)\.(\s|$)', str(error))
    entry = named.group(1) if named else 'unknown'
    package = next(
        (
            each.metadata['Name']
            for each in metadata.distributions()
            if any((e.group, e.name) == (_AUTOLOADED, entry) for e in each.entry_points)
        ),
        entry,
    )
    return section.error(
        f'import torch fails because of the package {package}: its entry point {entry} of the '
        f'group {_AUTOLOADED} fails with {type(cause).__name__}: {first_line(cause)}',
        f'PyTorch imports that package by itself: nothing that uses torch works. '
        f'{describe_torch_requirement(package)}'.strip(),
        f'install the {package} that was built for this torch, or: pip uninstall {package}. '
        f'Until then: export TORCH_DEVICE_BACKEND_AUTOLOAD=0',
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
