"""Prepare this process for its device: the one call that a script without a runner needs."""

from typing import Any, Dict

from mmdevplug.accelerators import DeviceContext
from mmdevplug.accelerators.detection import AcceleratorConfig
from mmdevplug.config.accelerator import AcceleratorOptions
from mmdevplug.distributed.process_group import start_distributed
from mmdevplug.model.placement import Placement
from mmdevplug.patches.barrier import patch_barrier
from mmdevplug.patches.mmcv_ops import patch_mmcv_ops
from mmdevplug.patches.mmengine import patch_checkpointing, patch_device_id, patch_mmengine
from mmdevplug.utils.host import keep_freed_memory
from mmdevplug.utils.torch_compat import import_version_module


def init_device(
    launcher: str = 'none', accelerator: AcceleratorConfig = None, **options: Any
) -> DeviceContext:
    """Choose the accelerator, start the process group, patch functions that refuse the device.

    Args:
        launcher (str): ``'pytorch'``, ``'slurm'``, ``'mpi'``, ``'kubernetes'`` or ``'none'``.
        accelerator (str, dict or Accelerator, optional): See
            :func:`mmdevplug.accelerators.choose_accelerator`. Defaults to None.
        **options: See :func:`mmdevplug.distributed.process_group.start_distributed`.

    Returns:
        DeviceContext: Also returned by :func:`mmdevplug.accelerators.device_context`.

    Raises:
        DevPlugError: If an option has an unknown value, or if an accelerator, a device, a launch
            variable or the backend cannot be used.

    Examples:
        >>> import mmdevplug
        >>> context = mmdevplug.init_device(launcher='pytorch')
        >>> model.to(context.device)
    """
    keep_freed_memory()
    import_version_module()
    patch_device_id()
    context = start_distributed(launcher, accelerator, **options)
    patch_checkpointing(context.device.type)
    patch_mmcv_ops()
    patch_barrier()
    return context


def init_from_options(
    launcher: str, options: AcceleratorOptions, placement: Placement, env_cfg: Dict[str, Any]
) -> DeviceContext:
    """Call :func:`init_device` for a runner, and patch MMEngine.

    ``env_cfg`` gets the backend that was chosen: what runs is what the log shows.
    """
    dist_cfg = dict(env_cfg.get('dist_cfg') or {})
    context = init_device(
        launcher,
        options.device,
        forced_backend=options.backend,
        choose_devices=placement.choose_devices,
        **dist_cfg,
    )
    patch_mmengine()
    if context.backend is not None:
        env_cfg['dist_cfg'] = dict(dist_cfg, backend=context.backend)
    return context
