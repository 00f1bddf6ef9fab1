"""Small computations that a device does as well as the CPU, or is not fit for training."""

from typing import Callable, Dict, List

import torch
from torch import Tensor, nn

from mmdevplug.accelerators import Accelerator

#: Of the largest expected value: devices that multiply in bfloat16 or TF32 stay below it.
RELATIVE_TOLERANCE = 1e-2


def _values(*shape: int) -> Tensor:
    count = 1
    for size in shape:
        count *= size
    # The same numbers everywhere, without a generator.
    numbers = torch.arange(count, device='cpu', dtype=torch.float32)
    return torch.sin(numbers * 0.37).reshape(shape)


def _matmul(device: torch.device) -> Tensor:
    return _values(16, 32).to(device) @ _values(32, 16).to(device)


def _conv(device: torch.device) -> Tensor:
    return nn.functional.conv2d(
        _values(2, 3, 8, 8).to(device), _values(4, 3, 3, 3).to(device), padding=1
    )


def _reduction(device: torch.device) -> Tensor:
    values = _values(8, 64).to(device)
    return torch.cat([values.sum(dim=0), values.mean(dim=1), values.amax(dim=1)])


def _softmax_backward(device: torch.device) -> Tensor:
    scores = _values(8, 10).to(device).requires_grad_()
    labels = torch.arange(8, device='cpu').to(device)
    nn.functional.cross_entropy(scores, labels).backward()
    return scores.grad


PROBES: Dict[str, Callable[[torch.device], Tensor]] = {
    'matmul': _matmul,
    'convolution': _conv,
    'reduction': _reduction,
    'softmax backward': _softmax_backward,
}


def run_probe(name: str, accelerator: Accelerator, device: torch.device) -> float:
    """Compute on a device and on the CPU.

    Args:
        name (str): A key of :data:`PROBES`.
        accelerator (Accelerator): The family of the device.
        device (torch.device): The device.

    Returns:
        float: The largest difference, as a part of the largest expected value; NaN if the device
        computes NaN, and infinity if it computes another shape.
    """
    expected = PROBES[name](torch.device('cpu'))
    computed = PROBES[name](device)
    found: List[Tensor] = accelerator.to_host([computed])
    if found[0].shape != expected.shape:
        return float('inf')
    difference = (found[0] - expected).abs().max() / expected.abs().max()
    return difference.item()
