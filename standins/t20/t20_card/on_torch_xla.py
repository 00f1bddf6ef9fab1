"""The card on torch_xla: real lazy devices on the host's CPU, one for each card."""

import gc
import os
from collections import Counter

os.environ.setdefault('PJRT_DEVICE', 'CPU')
_visible = os.environ.get('TOPS_VISIBLE_DEVICES')
os.environ['CPU_NUM_DEVICES'] = str(len(_visible.split(',')) if _visible else 8)

# After the variables, which torch_xla reads when it is imported.
import torch  # noqa: E402
import torch_xla  # noqa: E402
import torch_xla.core.xla_model as xm  # noqa: E402
import torch_xla.runtime as xr  # noqa: E402
from torch_xla.debug import metrics  # noqa: E402


class Card:
    """What the extension for PyTorch 1.10 offers, as far as torch_xla tells."""

    device_count = staticmethod(xr.addressable_device_count)
    current_device = staticmethod(torch_xla._XLAC._xla_get_default_device_ordinal)
    report = staticmethod(metrics.metrics_report)

    def __init__(self):
        self._executions = [Counter() for _ in range(self.device_count())]

    def set_count(self, count):
        assert count == self.device_count(), (count, self.device_count())

    def set_lose_weights(self, enabled):
        if enabled:
            raise NotImplementedError('torch_xla loses no weights')

    def set_narrow(self, enabled):
        if enabled:
            raise NotImplementedError('torch_xla computes in 64 bits')

    def set_device(self, index):
        torch_xla._XLAC._xla_set_default_device(f'xla:{index}')

    def seed_all(self, seed):
        for index in range(self.device_count()):
            xm.set_rng_state(seed, f'xla:{index}')

    def autocast(self):
        return torch.is_autocast_enabled('xla'), torch.get_autocast_dtype('xla')

    def set_autocast(self, enabled, dtype):
        torch.set_autocast_enabled('xla', enabled)
        torch.set_autocast_dtype('xla', dtype)

    def execute_all(self, index, reason):
        self._executions[index][reason] += 1
        torch_xla._XLAC._xla_step_marker(f'xla:{index}', [], wait=False)

    def execute_some(self, tensors, reason):
        self._executions[tensors[0].device.index][reason] += 1
        torch_xla._XLAC._xla_sync_multi(tensors, [], False, False)

    def clear_graphs(self):
        """Nothing: torch_xla keeps its graphs until the process ends."""

    def stats(self, index):
        """Describe one device; `executions` are those asked for, compilations those of all."""
        device = torch.device('xla', index)
        sizes = {
            tensor.data_ptr() or id(tensor): tensor.numel() * tensor.element_size()
            for tensor in gc.get_objects()
            if issubclass(type(tensor), torch.Tensor) and tensor.device == device
        }
        return dict(
            operations=0,
            executions=dict(self._executions[index]),
            compilations=(metrics.metric_data('CompileTime') or [0])[0],
            blocks=len(sizes),
            allocated=sum(sizes.values()),
            peak=sum(sizes.values()),
        )


card = Card()
