"""A stand-in for Enflame's ``torch_gcu 1.10`` (T20 generation) on top of torch_xla.

It offers the functions that the vendor's package has, with their names and arguments, on real lazy
devices. ``calls`` counts them, so that a test can tell that the GCU code path ran.
"""

import os
from collections import Counter
from contextlib import contextmanager
from enum import Enum

os.environ.setdefault('PJRT_DEVICE', 'CPU')
_visible = os.environ.get('TOPS_VISIBLE_DEVICES')
os.environ['CPU_NUM_DEVICES'] = str(len(_visible.split(',')) if _visible else 8)

# After the variables, which torch_xla reads when it is imported.
import torch  # noqa: E402
import torch_xla  # noqa: E402
import torch_xla.core.xla_model as xm  # noqa: E402
import torch_xla.runtime as xr  # noqa: E402

from . import amp  # noqa: E402

__version__ = '1.10.0+2.5.136'
__all__ = ['amp', 'calls']

calls = Counter()


class JitRunMode(Enum):
    """How to run a graph."""

    SYNC = 0
    ASYNC = 1
    SAFEASYNC = 2


def is_available():
    return device_count() > 0


def device_count():
    return xr.addressable_device_count()


def current_device():
    return torch_xla._XLAC._xla_get_default_device_ordinal()


def gcu_device(index=None):
    index = current_device() if index is None else index
    if not 0 <= index < device_count():
        raise IndexError(f'invalid device index {index}')
    calls['gcu_device'] += 1
    return torch.device('xla', index)


def set_device(device):
    calls['set_device'] += 1
    index = device if isinstance(device, int) else torch.device(device).index
    torch_xla._XLAC._xla_set_default_device(str(gcu_device(index)))


@contextmanager
def device(index):
    before = current_device()
    set_device(index)
    try:
        yield
    finally:
        set_device(before)


def get_device_name(index=None):
    return 'T20 (stand-in)'


def synchronize(device=None):
    calls['synchronize'] += 1
    xm.wait_device_ops()


def _name(device):
    return str(gcu_device()) if device is None else str(device)


def sync_lived_tensor(device=None, mode=JitRunMode.SAFEASYNC):
    calls['sync_lived_tensor'] += 1
    torch_xla._XLAC._xla_step_marker(_name(device), [], wait=mode is JitRunMode.SYNC)


def unlazy(tensors, mode=JitRunMode.SAFEASYNC):
    calls['unlazy'] += 1
    torch_xla._XLAC._xla_sync_multi(list(tensors), [], mode is JitRunMode.SYNC, False)


def fetch_gradients(optimizer):
    return [
        p.grad for group in optimizer.param_groups for p in group['params'] if p.grad is not None
    ]


def optimizer_step(
    optimizer,
    extra_output=None,
    optimizer_args=None,
    model=None,
    mode=JitRunMode.SAFEASYNC,
    device=None,
):
    calls['optimizer_step'] += 1
    loss = optimizer.step(**(optimizer_args or {}))
    sync_lived_tensor(device, mode)
    return loss


def collect_amp_training_params(model, optimizer, scaler):
    return [p for group in optimizer.param_groups for p in group['params']]
