"""Section *versions*: what is installed, what can be imported, and what does not go together."""

import platform
import re
import sys
from contextlib import suppress
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Tuple

from mmdevplug.errors import first_line
from mmdevplug.explanations.versions import (
    ONEDL,
    PACKAGES,
    distribution,
    explain_import,
    folder_of,
    install_command,
)
from mmdevplug.utils.built_for import describe_torch_requirement

from .findings import Finding, Section
from .isolated import Death, run_isolated

section = Section('versions')
IMPORT_SECONDS = 120.0

#: Packages and the modules that are tried: what this plugin needs comes first.
REQUIRED = ('torch', 'numpy', 'mmengine')
OPTIONAL = (
    *('mmcv', 'mmcv-lite', 'mmcv-full', 'torchvision', 'torch_xla', 'setuptools'),
    *('transformers', 'pycocotools', 'tensorboard', 'protobuf'),
)
#: Modules whose import needs no torch.
_WITHOUT_TORCH = ('numpy', 'mmengine')
#: Packages that PyTorch imports itself name a function in this group of entry points.
_AUTOLOADED = 'torch.backends'
#: OpenMMLab's own, which check each other's versions when they are imported.
LIBRARIES = (
    *('mmdet', 'mmseg', 'mmpretrain', 'mmpose', 'mmaction'),
    *('mmdet3d', 'mmocr', 'mmrotate', 'mmyolo', 'mmagic'),
)


def release(text: str) -> Tuple[int, ...]:
    """Read the numbers at the beginning of a version: (2, 13, 0) of ``'2.13.0+cpu'``."""
    numbers = re.match(r'\d+(\.\d+)*', text)
    return tuple(int(number) for number in numbers.group().split('.')) if numbers else ()


def check_rules(installed: Dict[str, str]) -> Iterator[Finding]:
    """Report installed versions that do not go together."""
    get = {name: release(text) for name, text in installed.items()}.get
    fork = 'mmengine' not in installed and ONEDL['mmengine'] in installed
    of_mmengine = ONEDL['mmengine'] if fork else 'mmengine'
    torch, mmengine, numpy, setuptools = map(get, ('torch', of_mmengine, 'numpy', 'setuptools'))
    torch_xla, torchvision, transformers = map(get, ('torch_xla', 'torchvision', 'transformers'))

    def named(*names: str) -> str:
        return ' beside '.join(f'{name} {installed[name]}' for name in names)

    if torch and torch < (1, 10):
        yield section.error(
            named('torch'),
            'mmdevplug is written for torch 1.10 and later.',
            "install the vendor's torch of release 1.10 or later",
        )
    if mmengine and not (0, 10) <= mmengine < (1, 0):
        yield section.error(
            named(of_mmengine),
            'mmdevplug is written for MMEngine 0.10.',
            f'pip install "{of_mmengine}>=0.10.0,<1.0"',
        )
    for module, of_onedl in ONEDL.items():
        for usual in _of_openmmlab(module, installed) if of_onedl in installed else ():
            yield section.error(
                named(usual, of_onedl),
                f"both install the folder {module}: files of OpenMMLab's and OneDL's are mixed "
                f'there, and uninstalling one removes files of the other.',
                f'pip uninstall -y {usual} {of_onedl} && pip install {of_onedl}  # or {usual}',
            )
    if torch and torch_xla and torch[:2] != torch_xla[:2]:
        yield section.error(
            named('torch', 'torch_xla'),
            'torch_xla is compiled against the torch of its own release and fails with others.',
            f'pip install "torch_xla=={torch[0]}.{torch[1]}.*"',
        )
    # The release of torchvision for torch 2.9 is 0.24, for torch 1.13 it is 0.14.
    minor = torch[1] + (15 if torch[0] == 2 else 1) if torch else 0
    if torch and torchvision and torchvision[:2] != (0, minor):
        yield section.error(
            named('torch', 'torchvision'),
            'torchvision is compiled against one release of torch; with another its operators are '
            'missing.',
            f'pip install --no-deps "torchvision==0.{minor}.*"',
        )
    if torch and numpy and numpy >= (2,) and torch < (2, 3):
        yield section.error(
            named('numpy', 'torch'),
            'torch before 2.3 is compiled against NumPy 1: tensor.numpy() fails with "Numpy is '
            'not available".',
            'pip install "numpy<2"',
        )
    if torch and torch < (1, 11):
        yield from _rules_of_torch_110(installed)
    if not setuptools or setuptools >= (81,):
        yield section.warning(
            named('setuptools') if setuptools else 'setuptools is not installed',
            'MMEngine imports pkg_resources, which setuptools 81 removed, for _base_ = '
            "'package::path' and to list installed packages.",
            'pip install "setuptools<81"',
        )
    for other in ('mmcv-full', 'mmcv-lite'):
        if 'mmcv' in installed and other in installed:
            yield section.error(
                named('mmcv', other),
                'they install the same folder, and each overwrites a part of the other.',
                'pip uninstall -y mmcv mmcv-full mmcv-lite && pip install "mmcv>=2.0.0,<2.2.0"',
            )
    # mmpretrain looks for both, and without one leaves out what fails.
    both = 'mmpretrain' in installed and 'pycocotools' in installed
    if both and transformers and transformers >= (4, 52):
        yield section.error(
            named('mmpretrain', 'transformers'),
            'mmpretrain imports names that transformers 4.52 removed, and then none of its models '
            'is found.',
            'pip install "transformers<4.52"',
        )
    if torch and mmengine and torch >= (2, 6) and mmengine < (1,) and not fork:
        yield section.note(
            named('torch', 'mmengine'),
            "MMEngine's own Runner cannot read its checkpoints with torch 2.6 and later, which "
            'does not run code from them; DeviceRunner can.',
            "runner_type = 'DeviceRunner'",
        )


def _rules_of_torch_110(installed: Dict[str, str]) -> Iterator[Finding]:
    """Report later releases than torch 1.10 and the libraries of its time work with."""
    writer = 'the TensorBoard writer of torch 1.10 cannot be imported with it'
    limits = [
        ('setuptools', '59.6', '==59.5.0', f'{writer}: it asks setuptools for distutils.version.'),
        ('protobuf', '4', '<4', f'{writer}: "Descriptors cannot be created directly".'),
        ('numpy', '1.24', '<1.24', 'it removed np.float and np.bool, which mmcv and mmdet use.'),
    ]
    for name, first_bad, wanted, why in limits:
        matters = name in installed and (name == 'numpy' or 'tensorboard' in installed)
        if matters and release(installed[name]) >= release(first_bad):
            found = f'{name} {installed[name]} beside torch {installed["torch"]}'
            yield section.warning(found, why, f'pip install "{name}{wanted}"')


def examine() -> Iterator[Finding]:
    """Compare versions, and import each library in a process that it may abort."""
    installed = {'python': platform.python_version()}
    libraries = [PACKAGES.get(name, name) for name in LIBRARIES]
    for package in (*REQUIRED, *OPTIONAL, *libraries, *ONEDL.values()):
        with suppress(metadata.PackageNotFoundError):
            installed[package] = metadata.version(package)
    listed = ', '.join(f'{name} {version}' for name, version in installed.items())
    yield section.ok(f'installed: {listed}', data=dict(installed))
    for package in REQUIRED:
        if package not in installed and find_spec(package) is None:
            yield section.error(
                f'{package} is not installed for {sys.executable}',
                'nothing can be trained without it.',
                # Vendors of accelerators ship a torch for them.
                "install the torch of the accelerator's vendor"
                if package == 'torch'
                else f'pip install {package}',
            )
    yield from check_rules(installed)
    yield from _files_of_others(installed)
    names, broken = modules_to_try(), False
    if 'torch' in names:
        for found in run_isolated(__name__, ['torch'], {}, IMPORT_SECONDS):
            finding = _broken('torch', found.describe()) if isinstance(found, Death) else found
            broken |= finding.level == 'error'
            yield finding
    if broken:
        # All others import torch, and would only repeat that it fails.
        names = [name for name in names if name in _WITHOUT_TORCH]
    names = [name for name in names if name != 'torch']
    for found in run_isolated(__name__, names, {}, IMPORT_SECONDS):
        yield _broken(found.task, found.describe()) if isinstance(found, Death) else found


def _of_openmmlab(module: str, installed: Dict[str, str]) -> List[str]:
    names = (PACKAGES.get(module, module), f'{module}-lite', f'{module}-full')
    return [name for name in names if name in installed]


def _files_of_others(installed: Dict[str, str]) -> Iterator[Finding]:
    """Report modules whose files are not those of the one package that is listed for them."""
    for module, of_onedl in ONEDL.items():
        packages, folder = _of_openmmlab(module, installed), folder_of(module)
        if bool(packages) == (of_onedl in installed):
            continue  # both are listed, which is reported already, or neither
        usual = PACKAGES.get(module, module)
        listed, other = (packages[0], of_onedl) if packages else (of_onedl, usual)
        if folder is None:
            found = f'{listed} {installed[listed]} is listed, but there is no module {module}'
            why = f'uninstalling {other} removed the files, which both packages install.'
        # OneDL's ask for the version of the package.
        elif ("'onedl-" in _text_of(folder, 'version.py')) == (listed == of_onedl):
            continue
        else:
            found = f'{listed} {installed[listed]} is listed, but {folder} has files of {other}'
            why = f'{other} was installed over it: modules of two releases are mixed.'
        again = f'pip install --force-reinstall --no-deps {listed}=={installed[listed]}'
        yield section.error(found, why, again)


def _text_of(folder: str, name: str) -> str:
    path = Path(folder) / name
    return path.read_text(encoding='utf-8') if path.is_file() else ''


def modules_to_try() -> List[str]:
    """List installed modules; those of vendors belong to the section *accelerators*."""
    names = [*REQUIRED, 'torchvision', 'torch_xla', 'mmcv', *LIBRARIES]
    found = [name for name in names if find_spec(name) is not None]
    if 'mmcv' in found:
        found.insert(found.index('mmcv') + 1, 'mmcv.ops')
    return found


def work(task: str, options: Dict[str, Any], say: Callable[[str], None]) -> Iterator[Finding]:
    """Import one module; see :mod:`mmdevplug.doctor.isolated`."""
    say(f'import {task}')
    try:
        import_module(task)
    except Exception as error:
        # Compiled libraries fail in many ways.
        found = f'import {task} fails with {type(error).__name__}: {error}'
        if task == 'torch' and error.__cause__ is not None:
            yield _broken_extension(error, error.__cause__)
            return
        problems = explain_import(error)
        for problem in problems:
            yield section.error(f'{found}. {problem.what}', _WHY, problem.command)
        if not problems:
            yield _broken(task, found)
        return
    yield section.ok(f'import {task} works')


_WHY = 'whatever imports it fails; mmdet and mmsegmentation import the operators of mmcv.'


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
    if module == 'mmcv.ops':
        return section.error(found, _WHY, install_command('mmcv'))
    package = distribution(module) or PACKAGES.get(module, module)
    version = 'VERSION'
    with suppress(metadata.PackageNotFoundError):
        version = metadata.version(package)
    return section.error(
        found,
        f'{module} is installed but broken: whatever imports it fails.',
        f'{sys.executable} -c "import {module}"  # then repair what it names, or: '
        f'pip install --force-reinstall --no-deps {package}=={version}',
    )
