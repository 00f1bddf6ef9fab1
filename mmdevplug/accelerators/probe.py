"""Try a device before a model is built on it."""

from typing import List

import torch

from mmdevplug.errors import AcceleratorError

from .base import Accelerator
from .vendor import explain_vendor_errors

#: Relative to the largest value; devices that multiply in bfloat16 or TF32 stay below.
RELATIVE_TOLERANCE = 1e-2
#: Values that change if they are stored in 32 bits.
WIDE = {torch.int64: 2**40 + 1, torch.float64: 1 / 3}


def probe_device(accelerator: Accelerator, device: torch.device) -> List[str]:
    """Run one small computation on a device and compare it with the CPU.

    Returns:
        list[str]: The dtypes that the device does not keep, of int64 and float64.

    Raises:
        AcceleratorError: If the device cannot be used or computes something else.
    """
    # Device and dtype are explicit because a user may have changed the defaults.
    host = torch.linspace(-1.0, 1.0, 64, device='cpu', dtype=torch.float32).reshape(8, 8)
    remedy = 'Check the driver and that no other process holds the device'
    with explain_vendor_errors(f'the first operation of device {device}', remedy, accelerator):
        accelerator.set_device(device)
        expected = host @ host.t() + 1.0
        there = host.to(device)
        (found,) = accelerator.copies.to_host([there @ there.t() + 1.0])
        # NaN is as far apart as can be.
        differences = (found - expected).abs().nan_to_num(nan=float('inf'), posinf=float('inf'))
        apart = (differences.max() / expected.max()).item()
    if apart > RELATIVE_TOLERANCE:
        raise AcceleratorError(
            f'device {device} computes a matrix product that differs from the CPU by '
            f'{apart:.3g}. {remedy} ({accelerator.describe_visibility()}), or choose another '
            f'accelerator with accelerator=dict(type=...).'
        )
    narrowed = []
    for dtype, value in WIDE.items():
        try:
            tensor = torch.tensor(value, dtype=dtype, device='cpu').to(device)
            kept = accelerator.copies.to_host([tensor])[0].item() == value
        except Exception:  # Some devices have no float64, which may show when it is fetched only.
            kept = False
        if not kept:
            narrowed.append(str(dtype).split('.')[-1])
    return narrowed
