"""Import the packages of vendors."""

import sys
import traceback
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Iterator, Optional

from mmdevplug.errors import AcceleratorError, DevPlugError
from mmdevplug.utils.built_for import describe_torch_requirement


@contextmanager
def explain_vendor_errors(what: str, remedy: str, of: Any = None) -> Iterator[None]:
    """Say what of a vendor fails: a missing driver or another version may raise anything.

    With ``of``, an accelerator, the message says what limits its devices.
    """
    try:
        yield
    except DevPlugError:
        raise
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        visible = '' if of is None else f' ({of.describe_visibility()})'
        raise AcceleratorError(
            f'{what} fails with {type(error).__name__}: {error} (at {place.filename}:'
            f'{place.lineno}). {remedy}{visible}, or choose another accelerator with '
            f'accelerator=dict(type=...) or MMDEVPLUG_ACCELERATOR.'
        ) from error


def import_vendor(package: str) -> Optional[ModuleType]:
    """Import a vendor's package, e.g. ``'torch_npu'``; None if it is not installed.

    Raises:
        AcceleratorError: If the package is there but its import fails.
    """
    if package in sys.modules:
        return sys.modules[package]
    if find_spec(package.split('.')[0]) is None:
        return None
    with explain_vendor_errors(
        f'the package {package!r} is installed for {sys.executable} but `import {package}`',
        f'{describe_torch_requirement(package)}Mend the installation (driver, version of torch)',
    ):
        return import_module(package)


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
    remedy = "Name a function without arguments that registers the device, see the package's docs"
    with explain_vendor_errors(f'accelerator.register={path!r}', remedy):
        getattr(import_module(module), name)()
