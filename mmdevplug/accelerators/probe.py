"""Try a device before a model is built on it."""

from typing import List, Union

import torch

from mmdevplug.errors import AcceleratorError

from .base import Accelerator

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
    try:
        accelerator.set_device(device)
        expected = host @ host.t() + 1.0
        there = host.to(device)
        (found,) = accelerator.copies.to_host([there @ there.t() + 1.0])
        # NaN is as far apart as can be.
        differences = (found - expected).abs().nan_to_num(nan=float('inf'), posinf=float('inf'))
        apart = (differences.max() / expected.max()).item()
    except Exception as error:
        raise AcceleratorError(
            f'device {device} failed its first operation with {type(error).__name__}: {error}. '
            f'{_circumstances(accelerator)}'
        ) from error
    if apart > RELATIVE_TOLERANCE:
        raise AcceleratorError(
            f'device {device} computes a matrix product that differs from the CPU by '
            f'{apart:.3g}. {_circumstances(accelerator)}'
        )
    wide = {dtype: torch.tensor(value, dtype=dtype, device='cpu') for dtype, value in WIDE.items()}
    return [
        str(dtype).split('.')[-1]
        for dtype, tensor in wide.items()
        if _sent_and_fetched(accelerator, device, tensor) != tensor.item()
    ]


def _sent_and_fetched(
    accelerator: Accelerator, device: torch.device, tensor: torch.Tensor
) -> Union[None, int, float]:
    try:
        return accelerator.copies.to_host([tensor.to(device)])[0].item()
    except Exception:  # Some devices have no float64, which may show when it is fetched only.
        return None


def _circumstances(accelerator: Accelerator) -> str:
    try:
        count = str(accelerator.device_count())
    except Exception as error:  # a driver that has just failed may fail again
        count = f'an unknown number ({error}) of'
    return (
        f'This process sees {count} {accelerator.name} device(s) '
        f'({accelerator.describe_visibility()}). Check the driver and that no other process '
        f'holds the device, or choose another accelerator with accelerator=dict(type=...).'
    )
