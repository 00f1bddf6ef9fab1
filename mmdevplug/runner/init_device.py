"""Prepare this process for its device: the one call that a script without a runner needs."""

from typing import Any

from mmdevplug.accelerators.detection import AcceleratorConfig
from mmdevplug.config.accelerator import AcceleratorOptions
from mmdevplug.distributed.process_group import DeviceContext, start_distributed
from mmdevplug.patches.collectives import patch_collectives
from mmdevplug.patches.mmcv_ops import patch_mmcv_ops


def init_device(
    launcher: str = 'none',
    accelerator: AcceleratorConfig = None,
    mmcv_ops: str = 'host',
    **options: Any,
) -> DeviceContext:
    """Choose the accelerator, start the process group, and patch what refuses the device.

    Args:
        launcher (str): ``'pytorch'``, ``'slurm'``, ``'mpi'`` or ``'none'``.
        accelerator (str, dict or Accelerator, optional): See
            :func:`mmdevplug.accelerators.choose_accelerator`. Defaults to None.
        mmcv_ops (str): What becomes of mmcv's operators that have no kernel for the device: see
            :func:`mmdevplug.patches.mmcv_ops.patch_mmcv_ops`. Defaults to ``'host'``.
        **options: See :func:`mmdevplug.distributed.process_group.start_distributed`.

    Returns:
        DeviceContext: Also returned by
        :func:`mmdevplug.distributed.process_group.device_context`.

    Raises:
        DevPlugError: If an option has an unknown value, or if an accelerator, a device, a launch
            variable or the backend cannot be used.

    Examples:
        >>> import mmdevplug
        >>> context = mmdevplug.init_device(launcher='pytorch')
        >>> model.to(context.device)
    """
    AcceleratorOptions.check('mmcv_ops', mmcv_ops)
    context = start_distributed(launcher, accelerator, **options)
    patch_mmcv_ops(context.accelerator, mmcv_ops)
    patch_collectives(context.accelerator)
    return context
