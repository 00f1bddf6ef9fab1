"""A model split over two devices by hand, with one mistake, for record_guard.py."""

import sys
from contextlib import ExitStack

import torch
import torch_xla
from torch import nn

from mmdevplug.device_guard import DeviceGuard


class Segmentor(nn.Module):
    """A backbone on one device and a head on another."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Conv2d(3, 8, 3, padding=1).to('xla:0')
        self.decode_head = nn.Conv2d(8, 19, 1).to('xla:1')

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Score each pixel."""
        features = self.backbone(images.to('xla:0'))
        return self.decode_head(features)


model = Segmentor()
with ExitStack() as stack:
    if '--guard' in sys.argv:
        stack.enter_context(DeviceGuard(model=model))
    scores = model(torch.rand(2, 3, 16, 16))
    torch_xla.sync()
    print('sum of the scores:', scores.sum().item())
