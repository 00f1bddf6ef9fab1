"""NVIDIA GPUs, and AMD GPUs through ROCm, which PyTorch names the same way."""

from typing import Any, List, Optional

import torch

from mmdevplug.registry import ACCELERATORS

from .base import Accelerator


@ACCELERATORS.register_module(name='cuda')
class CUDAAccelerator(Accelerator):
    """CUDA or ROCm devices."""

    name = 'cuda'
    device_type = 'cuda'
    native_backend = 'nccl'
    gloo_takes_tensors = True

    @property
    def visible_devices_env(self) -> str:  # type: ignore[override]
        return 'HIP_VISIBLE_DEVICES' if torch.version.hip else 'CUDA_VISIBLE_DEVICES'

    def is_available(self) -> bool:
        return torch.cuda.is_available()

    def device_count(self) -> int:
        return torch.cuda.device_count()

    def device_name(self, device: torch.device) -> str:
        return torch.cuda.get_device_name(device)

    def current_device(self) -> torch.device:
        return torch.device('cuda', torch.cuda.current_device())

    def set_device(self, device: torch.device) -> None:
        torch.cuda.set_device(device)

    def synchronize(self, device: Optional[torch.device] = None) -> None:
        torch.cuda.synchronize(device)

    def memory_allocated(self, device: Optional[torch.device] = None) -> int:
        return torch.cuda.memory_allocated(device)

    def max_memory_allocated(self, device: Optional[torch.device] = None) -> int:
        return torch.cuda.max_memory_allocated(device)

    def memory_total(self, device: torch.device) -> int:
        return torch.cuda.get_device_properties(device).total_memory

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def manual_seed(self, seed: int) -> None:
        torch.cuda.manual_seed_all(seed)

    def save_rng(self, device: torch.device) -> bytes:
        return torch.cuda.get_rng_state(device).numpy().tobytes()

    def load_rng(self, state: bytes, device: torch.device) -> None:
        torch.cuda.set_rng_state(torch.tensor(list(state), dtype=torch.uint8), device)

    def grad_scaler(self, **kwargs: Any) -> Any:
        return torch.cuda.amp.GradScaler(**kwargs)

    def ddp_device_ids(self, device: torch.device) -> List[int]:
        return [device.index]
