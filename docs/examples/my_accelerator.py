"""The accelerator "acme": a card that its maker's package torch_acme registers with PyTorch."""

from typing import Optional

import torch

from mmdevplug.accelerators import Accelerator
from mmdevplug.accelerators.vendor import import_vendor
from mmdevplug.registry import ACCELERATORS


@ACCELERATORS.register_module(name='acme')
class AcmeAccelerator(Accelerator):
    """Eager, and without a backend of torch.distributed: gradients go through the host."""

    name = 'acme'  # what a config asks for
    device_type = 'acme'  # what torch.device takes
    package = 'torch_acme'  # the maker's, whose version the log shows
    visible_devices_env = 'ACME_VISIBLE_DEVICES'  # named in messages, never changed

    def is_available(self) -> bool:
        # None if torch_acme is not installed; an error if it is there and broken.
        return import_vendor(self.package) is not None and torch.acme.is_available()

    def device_count(self) -> int:
        return torch.acme.device_count() if self.is_available() else 0

    def requirement(self) -> str:
        return 'the package torch_acme and a card'

    def set_device(self, device: torch.device) -> None:
        torch.acme.set_device(device.index)  # every maker's takes an index

    def synchronize(self, device: Optional[torch.device] = None) -> None:
        torch.acme.synchronize(device)

    def manual_seed(self, seed: int) -> None:
        torch.acme.manual_seed_all(seed)
