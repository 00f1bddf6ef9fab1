"""Profile the device with PyTorch's profiler or the vendor's."""

import os.path as osp
from typing import ContextManager, List, Optional

import torch
from mmengine.hooks import ProfilerHook
from mmengine.registry import HOOKS
from torch.profiler import ProfilerActivity

from mmdevplug.accelerators import context_of, rank_context
from mmdevplug.accelerators.base import privateuse1_name
from mmdevplug.utils.annotations import AnyRunner


@HOOKS.register_module()
class DeviceProfilerHook(ProfilerHook):
    """MMEngine's ``ProfilerHook`` for any accelerator.

    ``activity_with_cuda=True`` records the device, whatever its kind: PyTorch's profiler records
    CUDA, XPU, HPU and PrivateUse1 devices, and torch_xla's writes a trace of XLA devices into
    ``device_trace`` of the log folder, which TensorBoard shows. If neither knows the device, only
    the host is recorded, with a warning. Without any activity, PyTorch's profiler records all that
    it can. :class:`mmdevplug.DeviceRunner` uses this hook instead of MMEngine's.

    Args:
        activity_with_cuda (bool): Whether to record the device. Defaults to False.
        **kwargs: See :class:`mmengine.hooks.ProfilerHook`.
    """

    lost = 'it profiles CUDA alone'
    activities: List[ProfilerActivity]

    def __init__(self, *, activity_with_cuda: bool = False, **kwargs: object) -> None:
        accelerator = rank_context().accelerator
        self._records_device = activity_with_cuda and accelerator.name != 'cpu'
        activity = _activity_of(accelerator.device_type)
        super().__init__(activity_with_cuda=activity_with_cuda and activity is None, **kwargs)
        # MMEngine adds CUDA, whatever the device is.
        self.activities = [a for a in self.activities if a.name != 'CUDA']
        if self._records_device and activity is not None:
            self.activities.append(activity)
        if not self.activities:
            # What PyTorch records by itself. Before 2.13 an empty list meant that, too.
            self.activities = list(torch.profiler.supported_activities())
        self._trace: Optional[ContextManager] = None

    def before_run(self, runner: AnyRunner) -> None:
        """Start the profilers; see :meth:`mmengine.hooks.ProfilerHook.before_run`."""
        super().before_run(runner)
        accelerator = context_of(runner).accelerator
        if not self._records_device or _activity_of(accelerator.device_type) is not None:
            return
        folder = osp.join(runner.log_dir, 'device_trace', f'rank{runner.rank}')
        self._trace = accelerator.trace(folder)
        if self._trace is None:
            runner.logger.warning(
                f'ProfilerHook.activity_with_cuda=True: no profiler is known for accelerator '
                f'{accelerator.name!r}; the host alone is recorded.'
            )
            return
        self._trace.__enter__()
        runner.logger.info(f'The profile of the device will be written to {folder}.')

    def _export_chrome_trace(self, runner: AnyRunner) -> None:
        context = context_of(runner)
        context.accelerator.synchronize(context.device)
        if self._trace is not None:
            self._trace.__exit__(None, None, None)
            self._trace = None
        super()._export_chrome_trace(runner)


def _activity_of(device_type: str) -> Optional[ProfilerActivity]:
    """The activity with which PyTorch's profiler records devices of a type, if there is one."""
    name = 'PrivateUse1' if device_type == privateuse1_name() else device_type.upper()
    return ProfilerActivity.__members__.get(name)
