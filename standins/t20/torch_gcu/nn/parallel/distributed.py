"""The vendor's own data-parallel wrapper, up to where it needs a group of eccl."""

import torch

from ...core.device import _index_of, device_count
from ...distributed.distributed_c10d import _get_default_group


class DistributedDataParallel(torch.nn.Module):
    """Checks its arguments as the vendor's does; then there is no group of eccl."""

    def __init__(
        self,
        module,
        device_ids=None,
        output_device=None,
        dim=0,
        broadcast_buffers=True,
        process_group=None,
        bucket_cap_mb=256,
        find_unused_parameters=False,
        check_reduction=False,
        gradient_as_bucket_view=False,
    ):
        super().__init__()
        assert any(parameter.requires_grad for parameter in module.parameters()), (
            "DistributedDataParallel is not needed when a module doesn't have any parameter "
            'that requires a gradient.'
        )
        if device_ids is not None and len(device_ids) > 1:
            raise RuntimeError('device_ids can only be None or contain a single element.')
        devices = {parameter.device for parameter in module.parameters()}
        types = {device.type for device in devices}
        assert len(types) == 1, (
            "DistributedDataParallel's input module must be on the same type of devices, but "
            f'input module parameters locate in {types}.'
        )
        if types == {'cpu'} or len(devices) > 1:
            given = device_ids or output_device
            assert not given, (
                'DistributedDataParallel device_ids and output_device arguments only work with '
                f'single-device GPU modules, but got device_ids {device_ids}, output_device '
                f'{output_device}, and module parameters {devices}.'
            )
            self.device_ids = None
        else:
            ids = range(device_count()) if device_ids is None else device_ids
            self.device_ids = [_index_of(device, optional=True) for device in ids]
        self.process_group = process_group or _get_default_group()
        raise NotImplementedError('the stand-in has no ProcessGroupECCL')

    def no_sync(self):
        raise NotImplementedError

    def forward(self, *inputs, **kwargs):
        raise NotImplementedError

    def scatter(self, inputs, kwargs, device_ids):
        raise NotImplementedError

    def parallel_apply(self, replicas, inputs, kwargs):
        raise NotImplementedError

    def gather(self, outputs, output_device):
        raise NotImplementedError

    def train(self, mode=True):
        return super().train(mode)

    def join(self, divide_by_initial_world_size=True, enable=True):
        raise NotImplementedError

    def will_sync_module_buffers(self):
        raise NotImplementedError

    def set_zero_opt(self, zero):
        raise NotImplementedError
