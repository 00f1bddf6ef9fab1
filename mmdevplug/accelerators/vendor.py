"""Import the packages of vendors."""

import sys
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Optional

from mmdevplug.errors import AcceleratorError
from mmdevplug.utils.built_for import describe_torch_requirement


def import_vendor(package: str) -> Optional[ModuleType]:
    """Import a vendor's package, e.g. ``'torch_npu'``; None if it is not installed.

    Raises:
        AcceleratorError: If the package is there but its import fails.
    """
    if package in sys.modules:
        return sys.modules[package]
    if find_spec(package.split('.')[0]) is None:
        return None
    try:
        return import_module(package)
    except Exception as error:
        # A missing driver or a library of another version may raise anything.
        raise AcceleratorError(
            f'the package {package!r} is installed for {sys.executable} but `import {package}` '
            f'fails with {type(error).__name__}: {error}. {describe_torch_requirement(package)} '
            f'Mend the installation (driver, version of torch), or choose another accelerator '
            f'with accelerator=dict(type=...) or MMDEVPLUG_ACCELERATOR.'
        ) from error


@lru_cache(maxsize=None)
def register_vendor(path: str) -> None:
    """Call a function ``'package.module:function'`` that registers a device, once in a process.

    Raises:
        AcceleratorError: If there is no such function, or it fails.
    """
    module, _, name = path.partition(':') if isinstance(path, str) else ('', '', '')
    if not module or not name:
        raise AcceleratorError(
            f'accelerator.register={path!r}: expected a function to call after the import of the '
            f"package, e.g. 'torch_acme.devices:register'."
        )
    try:
        getattr(import_module(module), name)()
    except Exception as error:
        # As above.
        raise AcceleratorError(
            f'accelerator.register={path!r} fails with {type(error).__name__}: {error}. Expected '
            f"a function without arguments that registers the device; see the package's own docs."
        ) from error
