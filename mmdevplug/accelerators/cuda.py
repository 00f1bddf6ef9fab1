"""NVIDIA GPUs, and AMD GPUs through ROCm, which PyTorch calls ``cuda`` too."""

import torch

from mmdevplug.registry import ACCELERATORS

from .torch_native import TorchNativeAccelerator


@ACCELERATORS.register_module(name='cuda')
class CUDAAccelerator(TorchNativeAccelerator):
    """CUDA or ROCm devices."""

    name = device_type = 'cuda'
    native_backend = 'nccl'
    gloo_takes_tensors = True
    draws_weights = True  # as MMEngine alone, whose earlier runs people want to repeat

    def __init__(self) -> None:
        """Keep the attributes of the class, which a subclass may set."""

    @property
    def visible_devices_env(self) -> str:  # type: ignore[override]
        return 'HIP_VISIBLE_DEVICES' if torch.version.hip else 'CUDA_VISIBLE_DEVICES'

    def memory_total(self, device: torch.device) -> int:
        # mem_get_info() would create a CUDA context on the device.
        return torch.cuda.get_device_properties(device).total_memory
