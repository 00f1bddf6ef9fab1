"""mmcv's compiled operators on devices that they have no kernel for."""

from .patch import host_use, patch_mmcv_ops, restore_mmcv_ops

__all__ = ['host_use', 'patch_mmcv_ops', 'restore_mmcv_ops']
