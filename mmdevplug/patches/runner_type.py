"""Let ``Runner.from_cfg`` build the runner that a config names, as ``RUNNERS.build`` does."""

import sys
from typing import Any

from mmengine.registry import RUNNERS

from mmdevplug.config.prepare import refuse_flexible_runner
from mmdevplug.utils.patching import OWN, active_patches, patch_symbol


def follow_runner_type() -> None:
    """Let ``Runner.from_cfg`` follow ``runner_type`` where that names a runner of ours.

    Our base configs call it when they are read: scripts such as mmseg's and mmpose's
    ``tools/test.py`` call ``Runner.from_cfg``, which ignores the key and would run on the devices
    that MMEngine knows, without a word. A process that has not imported MMEngine's runner by then
    only reads the config. Subclasses of Runner, and configs that name no runner of ours, are left
    alone; FlexibleRunner refuses configs with the key ``accelerator``, which it ignores.
    """
    module = sys.modules.get('mmengine.runner')
    if module is None:
        return
    if active_patches(module.FlexibleRunner):
        return  # this process has read one of them before
    runner_class = module.Runner
    from_cfg = runner_class.from_cfg.__func__

    def build_named(cls: type, cfg: Any) -> Any:
        named = cls is runner_class and cfg.get('runner_type') == 'DeviceRunner'
        return RUNNERS.build(cfg) if named else from_cfg(cls, cfg)

    patch_symbol(runner_class, 'from_cfg', classmethod(build_named), OWN)
    flexible = module.FlexibleRunner.from_cfg.__func__

    def build_flexible(cls: type, cfg: Any) -> Any:
        if 'accelerator' in cfg:
            refuse_flexible_runner(dict(runner_type=cls.__name__))
        return flexible(cls, cfg)

    patch_symbol(module.FlexibleRunner, 'from_cfg', classmethod(build_flexible), OWN)
