"""The host itself."""

import os
from typing import Optional

import torch

from mmdevplug.registry import ACCELERATORS

from .base import Accelerator


@ACCELERATORS.register_module(name='cpu')
class CPUAccelerator(Accelerator):
    """CPU training, with any number of ranks on one host."""

    name = 'cpu'
    device_type = 'cpu'
    native_backend = 'mpi'
    gloo_takes_tensors = True
    shares_devices = True
    draws_weights = True  # this device is the host

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def device(self, local_rank: int = 0) -> torch.device:
        # No index: PyTorch's own CPU tensors carry none, and `cpu:0 != cpu`.
        return torch.device('cpu')

    def set_device(self, device: torch.device) -> None:
        pass

    def synchronize(self, device: Optional[torch.device] = None) -> None:
        pass

    def memory_total(self, device: torch.device) -> int:
        return os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
