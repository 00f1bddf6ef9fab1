"""One batch over several cards of a process."""

from itertools import chain

import torch

from ...core.device import _index_of, device_count
from .parallel_apply import parallel_apply
from .replicate import replicate
from .scatter_gather import gather, scatter_kwargs


class DataParallel(torch.nn.Module):
    """Cuts the batch, calls a copy of the module on each card, joins the outputs."""

    def __init__(self, module, device_ids=None, output_device=None, dim=0):
        super().__init__()
        device_ids = list(range(device_count())) if device_ids is None else device_ids
        self.dim, self.module = dim, module
        self.device_ids = [_index_of(device, optional=True) for device in device_ids]
        output_device = self.device_ids[0] if output_device is None else output_device
        self.output_device = _index_of(output_device, optional=True)
        self.src_device_obj = torch.device('xla', self.device_ids[0])
        if len(self.device_ids) == 1:
            self.module.to(self.src_device_obj)

    def forward(self, *inputs, **kwargs):
        if not self.device_ids:
            return self.module(*inputs, **kwargs)
        for tensor in chain(self.module.parameters(), self.module.buffers()):
            if tensor.device != self.src_device_obj:
                raise RuntimeError(
                    'module must have its parameters and buffers on device '
                    f'{self.src_device_obj} (device_ids[0]) but found one of them on device: '
                    f'{tensor.device}'
                )
        inputs, kwargs = self.scatter(inputs, kwargs, self.device_ids)
        if len(self.device_ids) == 1:
            return self.module(*inputs[0], **kwargs[0])
        replicas = self.replicate(self.module, self.device_ids[: len(inputs)])
        return self.gather(self.parallel_apply(replicas, inputs, kwargs), self.output_device)

    def replicate(self, module, device_ids):
        return replicate(module, device_ids, not torch.is_grad_enabled())

    def scatter(self, inputs, kwargs, device_ids):
        return scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)

    def parallel_apply(self, replicas, inputs, kwargs):
        return parallel_apply(replicas, inputs, kwargs, self.device_ids[: len(replicas)])

    def gather(self, outputs, output_device):
        return gather(outputs, output_device, dim=self.dim)


def data_parallel(module, inputs, device_ids=None, output_device=None, dim=0, module_kwargs=None):
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    wrapped = DataParallel(module, device_ids, output_device, dim)
    return wrapped(*inputs, **(module_kwargs or {}))
