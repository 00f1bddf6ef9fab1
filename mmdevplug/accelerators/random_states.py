"""Save and restore the states of all random-number generators of a rank."""

import base64
import json
import random
from typing import Any, Dict, List, Optional, Sequence

import numpy as np
import torch

from . import Accelerator

RandomState = Dict[str, Any]


def host_random_state() -> RandomState:
    """The states of Python's, NumPy's and PyTorch's generators on the host, as text.

    JSON and ``weights_only`` loading take text.
    """
    state: Any = np.random.get_state()
    kind, keys, position, has_gauss, cached = state
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


def random_state(accelerator: Accelerator, devices: Sequence[torch.device]) -> RandomState:
    """The states of the host's generators and of a rank's devices.

    ``device`` is None if the vendor reports no state; ``more_devices`` is there for a model that
    is spread over several.
    """
    saved: List[Optional[str]] = []
    for device in devices:
        on_device = accelerator.save_rng(device)
        saved.append(None if on_device is None else _encode(on_device))
    state = dict(host_random_state(), accelerator=accelerator.name, device=saved[0])
    return dict(state, more_devices=saved[1:]) if saved[1:] else state


def set_random_state(
    state: RandomState, accelerator: Accelerator, devices: Sequence[torch.device]
) -> Optional[str]:
    """Restore what :func:`random_state` returned; returns what could not be restored and why."""
    set_host_random_state(state)
    if state['accelerator'] != accelerator.name:
        return f'they were saved on accelerator {state["accelerator"]!r}'
    saved = [state['device'], *state.get('more_devices', [])]
    for on_device, device in zip(saved, devices):
        if on_device is not None:
            accelerator.load_rng(_decode(on_device), device)
        elif not accelerator.shares_devices:
            return f'accelerator {accelerator.name!r} does not report the state of its generator'
    if len(saved) != len(devices):
        return f'they were saved of {len(saved)} device(s), and this rank has {len(devices)}'
    return None


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode('ascii')


def _decode(text: str) -> bytes:
    return base64.b64decode(text.encode('ascii'))
