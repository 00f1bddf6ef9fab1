"""Let a script build our runner, or ours under its own, whichever way it builds one."""

import sys
from functools import wraps
from typing import Any, Callable

from mmdevplug.config.runner_config import refuse_flexible_runner
from mmdevplug.errors import LaunchError, first_line
from mmdevplug.registry import ours_for
from mmdevplug.utils.patching import OWN, active_patches, patch_symbol


def follow_runner_type() -> None:
    """Let MMEngine's runner, and subclasses of it, follow the key ``accelerator`` of a config.

    Our base configs call it when they are read, and our command before it builds a runner. Scripts
    such as mmseg's and mmpose's ``tools/test.py`` call ``Runner.from_cfg``, which ignores
    ``runner_type``; others call ``Runner(..., cfg=cfg)``; a repository may have its own runner.
    All would run on the devices that MMEngine knows, without a word. A process that has not
    imported MMEngine's runner by then only reads the config. Configs that ask for no accelerator
    are left alone; FlexibleRunner refuses those that do.
    """
    module = sys.modules.get('mmengine.runner')
    if module is None or active_patches(module.FlexibleRunner):
        return  # or this process has read one of them before
    _build_ours(module.Runner, asks_for_ours)
    flexible = module.FlexibleRunner.from_cfg.__func__

    def build_flexible(cls: type, cfg: Any) -> Any:
        if 'accelerator' in cfg:
            refuse_flexible_runner(dict(runner_type=cls.__name__))
        return flexible(cls, cfg)

    patch_symbol(module.FlexibleRunner, 'from_cfg', classmethod(build_flexible), OWN)
    utils = sys.modules['mmengine.dist.utils']
    for name in ('_init_dist_pytorch', '_init_dist_mpi', '_init_dist_slurm'):
        patch_symbol(utils, name, _explaining(getattr(utils, name)), OWN)


def _explaining(start: Callable[..., None]) -> Callable[..., None]:
    @wraps(start)
    def explaining(*args: object, **kwargs: object) -> None:
        try:
            start(*args, **kwargs)
        except (AttributeError, RuntimeError, AssertionError) as error:
            raise LaunchError(
                f'init_dist() of MMEngine cannot start the process group here: '
                f'{type(error).__name__}: {first_line(error)}. Leave that to the runner, which '
                f'takes the accelerator of the config: delete the call of init_dist().'
            ) from error

    return explaining


def asks_for_ours(cfg: Any) -> bool:
    """Whether a config names an accelerator or our runner."""
    return bool(cfg) and ('accelerator' in cfg or cfg.get('runner_type') == 'DeviceRunner')


def replace_runner() -> None:
    """Let MMEngine's runner and its subclasses be ours for every config, see ``autopatch``."""
    from mmengine.runner import Runner

    _build_ours(Runner, lambda cfg: True)


def _build_ours(runner_class: Any, is_asked: Any) -> None:
    from_cfg = runner_class.from_cfg.__func__

    def build(cls: object, cfg: object) -> object:
        ours: Any = ours_for(cls) if is_asked(cfg) else cls
        return from_cfg(cls, cfg) if ours is cls else ours.from_cfg(cfg)

    def create(cls: Any, *args: object, **kwargs: Any) -> Any:
        # Python calls the constructor of what this returns.
        return object.__new__(ours_for(cls) if is_asked(kwargs.get('cfg')) else cls)

    patch_symbol(runner_class, 'from_cfg', classmethod(build), OWN)
    patch_symbol(runner_class, '__new__', staticmethod(create), OWN)
