"""Load configs of installed packages, such as ``mmseg::pspnet/...``.

MMEngine looks for packages with pkg_resources, which setuptools has no longer since release 81.
"""

from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Iterator, Optional

from mmengine.config import Config, config as config_module
from mmengine.config.utils import MODULE2PACKAGE

from mmdevplug.utils.patching import LocalPatch

_is_installed = LocalPatch(config_module, 'is_installed')
_get_installed_path = LocalPatch(config_module, 'get_installed_path')
_MODULES = {package: module for module, package in MODULE2PACKAGE.items()}


def load_file(path: str) -> Config:
    """Load a config from a path, or from ``package::path`` as in a config's ``_base_``."""
    with _packages_found():
        if '::' in path:
            path, _ = Config._get_cfg_path(path, '')
        return Config.fromfile(path)


@contextmanager
def _packages_found() -> Iterator[None]:
    """Answer MMEngine's questions for packages where pkg_resources cannot."""
    if find_spec('pkg_resources') is not None:
        yield
        return
    with _is_installed(lambda _, package: _folder(package) is not None):
        with _get_installed_path(_installed_path):
            yield


def _folder(package: str) -> Optional[str]:
    """The folder of a package, by the name of its distribution or its module."""
    spec = find_spec(_MODULES.get(package, package))
    return None if spec is None or spec.origin is None else str(Path(spec.origin).parent)


def _installed_path(_: Any, package: str) -> str:
    folder = _folder(package)
    if folder is None:
        raise ModuleNotFoundError(
            f'the config names the package {package!r}, which is not installed; install it, or '
            f'give the path of a file.'
        )
    return folder
