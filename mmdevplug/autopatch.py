"""An explicit patch for scripts that call ``Runner.from_cfg`` and so ignore ``runner_type``.

``custom_imports = dict(imports=['mmdevplug.autopatch'])`` in a config, or
``import mmdevplug.autopatch`` in a script, makes ``mmengine.runner.Runner.from_cfg`` build a
:class:`mmdevplug.DeviceRunner`. Subclasses of Runner are left alone.
"""

from mmengine.config import Config
from mmengine.runner import Runner

from .runner import DeviceRunner
from .utils.patching import OWN, patch_symbol

_from_cfg = Runner.from_cfg.__func__


def _build_device_runner(cls: type, cfg: Config) -> Runner:
    return DeviceRunner.from_cfg(cfg) if cls is Runner else _from_cfg(cls, cfg)


patch_symbol(Runner, 'from_cfg', classmethod(_build_device_runner), OWN)
