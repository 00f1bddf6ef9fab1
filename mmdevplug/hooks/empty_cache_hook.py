"""Empty the cache of any accelerator."""

from mmengine.hooks import EmptyCacheHook
from mmengine.registry import HOOKS

from mmdevplug.accelerators import context_of
from mmdevplug.utils.annotations import AnyRunner


@HOOKS.register_module()
class DeviceEmptyCacheHook(EmptyCacheHook):
    """MMEngine's ``EmptyCacheHook``, which knows only CUDA and MUSA, for any accelerator.

    :class:`mmdevplug.DeviceRunner` uses it instead of MMEngine's. It does nothing on devices
    without a cache (XLA, the CPU). Arguments are those of :class:`mmengine.hooks.EmptyCacheHook`.
    """

    lost = 'it empties the cache of CUDA and MUSA alone'

    def _after_iter(self, runner: AnyRunner, *args: object, **kwargs: object) -> None:
        if self._do_after_iter:
            context_of(runner).accelerator.empty_cache()

    def _before_epoch(self, runner: AnyRunner, mode: str = 'train') -> None:
        if self._do_before_epoch:
            context_of(runner).accelerator.empty_cache()

    def _after_epoch(self, runner: AnyRunner, mode: str = 'train') -> None:
        if self._do_after_epoch:
            context_of(runner).accelerator.empty_cache()
