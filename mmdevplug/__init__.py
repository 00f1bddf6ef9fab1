"""Train any OpenMMLab model on any PyTorch accelerator by inheriting one base config.

Importing this package registers its parts with MMEngine and does nothing else; torch and the
vendors' packages are imported when they are first needed.
"""

import sys
from importlib import import_module
from typing import List

from .version import __version__

_MISSING = ''
try:
    from mmengine.registry import HOOKS, MODEL_WRAPPERS, OPTIM_WRAPPERS, RUNNERS
except ModuleNotFoundError as error:
    if error.name != 'mmengine':
        raise
    # What other loops use can be imported all the same, such as mmdevplug.staged.
    _MISSING = (
        f"mmdevplug extends MMEngine, and {sys.executable} has no module 'mmengine'. Install "
        f"OpenMMLab's with pip install 'mmdevplug[mmengine]', or OneDL's, which replaces it, with "
        f"pip install 'mmdevplug[onedl]'. If pip lists it already, add --force-reinstall: "
        f'uninstalling the other one has removed its files.'
    )
else:
    from .registry import MODULES, register_lazily

    register_lazily(RUNNERS, 'mmdevplug.runner', DeviceRunner='device_runner')
    register_lazily(MODEL_WRAPPERS, 'mmdevplug.gradients', **MODULES['gradients'])
    register_lazily(OPTIM_WRAPPERS, 'mmdevplug.optim', **MODULES['optim'])
    register_lazily(HOOKS, 'mmdevplug.hooks', **MODULES['hooks'])

_LAZY = {
    'ACCELERATORS': 'mmdevplug.registry',
    'base_config': 'mmdevplug.config.base_config',
    'available_accelerators': 'mmdevplug.accelerators',
    'get_accelerator': 'mmdevplug.accelerators',
    'DeviceDistributedDataParallel': 'mmdevplug.gradients.wrapper',
    'DeviceHook': 'mmdevplug.hooks.device_hook',
    'DeviceRunner': 'mmdevplug.runner',
    'follow_runner_type': 'mmdevplug.patches.runner_type',
    'init_device': 'mmdevplug.runner',
    'patch_mmengine': 'mmdevplug.patches.mmengine',
    'enter_rank_device': 'mmdevplug.accelerators',
}

#: What works without MMEngine.
_PLAIN = (
    *('ACCELERATORS', 'base_config', 'available_accelerators', 'get_accelerator'),
    'enter_rank_device',
)

__all__ = ['__version__', *_LAZY]


def require_mmengine() -> None:
    """Raise if there is no MMEngine, with what to install.

    Raises:
        ModuleNotFoundError: If it is not installed.
    """
    if _MISSING:
        raise ModuleNotFoundError(_MISSING, name='mmengine')


def __dir__() -> List[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith('__'))})


def __getattr__(name: str):
    if name in _LAZY and name not in _PLAIN:
        require_mmengine()
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
