"""The stand-in card "zeta" with one fault, which the variable BROKEN names."""

import os
from functools import cached_property

import card
import torch

from mmdevplug.accelerators import Copies, TorchNativeAccelerator
from mmdevplug.registry import ACCELERATORS

card.install('zeta', count=2)
BROKEN = os.environ['BROKEN']


def wrong(inputs):
    return (inputs.cpu() * torch.sigmoid(inputs.cpu()) * 1.01).to(inputs.device)


KERNELS = {'operation': wrong, 'abort': lambda inputs: os.abort()}
# Kept, because a library that is gone takes its kernels with it.
LIBRARY = torch.library.Library('aten', 'IMPL')
if BROKEN in KERNELS:
    LIBRARY.impl('silu', KERNELS[BROKEN], 'PrivateUse1')


def halve_in_backward(target, *args, copy=torch.Tensor.copy_, **kwargs):
    """Copy, but wrongly where backward does it, which other threads may."""
    copy(target, *args, **kwargs)
    in_backward = torch._C._current_graph_task_id() != -1
    return target.mul_(0.5) if in_backward and target.device.type == 'zeta' else target


if BROKEN == 'gradients':
    torch.Tensor.copy_ = halve_in_backward


def in_order_of_memory(tensor):
    """What a copy brings that knows no strides."""
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return flat.cpu().reshape(tensor.shape)


class ZetaCopies(Copies):
    def to_host(self, tensors):
        if BROKEN == 'strides':
            return [in_order_of_memory(tensor.detach()) for tensor in tensors]
        return super().to_host(tensors)


@ACCELERATORS.register_module(name='zeta')
class Zeta(TorchNativeAccelerator):
    copies = cached_property(ZetaCopies)

    def __init__(self):
        super().__init__('zeta')

    def load_rng(self, state, device):
        super().load_rng(state, device)
        if BROKEN == 'generator':  # which is the host's on this card
            torch.manual_seed(99)
