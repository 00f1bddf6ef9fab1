"""The states of all random-number generators of a rank."""

import base64
import json
import random
from typing import Any, Dict, Optional

import numpy as np
import torch

from mmdevplug.device import Accelerator

RandomState = Dict[str, Any]


def host_random_state() -> RandomState:
    """The states of Python's, NumPy's and PyTorch's generators on the host.

    Returns:
        dict: Of text, which JSON and ``weights_only`` loading take, and which is quick to copy.
    """
    kind, keys, position, has_gauss, cached = np.random.get_state()
    numbers = [str(kind), _encode(keys.tobytes()), int(position), int(has_gauss), float(cached)]
    return dict(
        python=json.dumps(random.getstate()),
        numpy=json.dumps(numbers),
        torch=_encode(torch.get_rng_state().numpy().tobytes()),
    )


def set_host_random_state(state: RandomState) -> None:
    """Restore what :func:`host_random_state` returned."""
    version, numbers, gauss = json.loads(state['python'])
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, position, has_gauss, cached = json.loads(state['numpy'])
    keys = np.frombuffer(_decode(keys), dtype=np.uint32)
    np.random.set_state((kind, keys, position, has_gauss, cached))
    torch.set_rng_state(torch.tensor(list(_decode(state['torch'])), dtype=torch.uint8))


def random_state(accelerator: Accelerator, device: torch.device) -> RandomState:
    """The states of the host's generators and of a device's.

    Args:
        accelerator (Accelerator): The family of the device.
        device (torch.device): The device of this rank.

    Returns:
        dict: With ``device`` None where the vendor tells no state.
    """
    on_device = accelerator.save_rng(device)
    return dict(
        host_random_state(),
        accelerator=accelerator.name,
        device=None if on_device is None else _encode(on_device),
    )


def set_random_state(
    state: RandomState, accelerator: Accelerator, device: torch.device
) -> Optional[str]:
    """Restore what :func:`random_state` returned.

    Returns:
        str or None: What could not be restored and why.
    """
    set_host_random_state(state)
    if state['accelerator'] != accelerator.name:
        return f'they were saved on accelerator {state["accelerator"]!r}'
    if state['device'] is not None:
        accelerator.load_rng(_decode(state['device']), device)
    elif not accelerator.shares_devices:
        return f'accelerator {accelerator.name!r} does not tell the state of its generator'
    return None


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode('ascii')


def _decode(text: str) -> bytes:
    return base64.b64decode(text.encode('ascii'))
