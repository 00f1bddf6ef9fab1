"""Read a checkpoint without running what is inside it."""

import os
from typing import Any, Dict, Mapping

import torch
from mmengine.runner import CheckpointLoader
from torch import Tensor

from mmdevplug.accelerators.move_nested import to_device
from mmdevplug.errors import CheckpointError
from mmdevplug.patches.torch_load import safe_loading


def read_checkpoint(filename: str, map_location: Any = 'cpu') -> Dict[str, Any]:
    """Read a checkpoint from a path, or an address that MMEngine knows (``https://``, ...).

    A file that is no checkpoint, or holds classes other than MMEngine's, raises CheckpointError.
    """
    filename = os.path.expanduser(str(filename))
    with safe_loading(filename):
        if os.path.isfile(filename):
            read = torch.load(filename, map_location=map_location)
        else:
            read = CheckpointLoader.load_checkpoint(filename, map_location)
    # The T20's rebuild function sends tensors to the current card, whatever map_location says.
    return to_device(read, 'cpu') if map_location == 'cpu' else read


def read_for_model(filename: str, map_location: Any = 'cpu') -> Dict[str, Any]:
    """Read a checkpoint that has weights, alone or under ``state_dict``, where they are then."""
    checkpoint = read_checkpoint(filename, map_location)
    if not isinstance(checkpoint, dict):
        raise CheckpointError(
            f'checkpoint {filename} is of type {type(checkpoint).__name__}; expected a dict with '
            f'weights by name, or with them under state_dict. Save it so.'
        )
    if 'state_dict' not in checkpoint:
        if any(isinstance(value, Tensor) for value in checkpoint.values()):
            return dict(state_dict=checkpoint)
        checkpoint = dict(checkpoint, state_dict=checkpoint)
    if not isinstance(checkpoint['state_dict'], Mapping):
        raise CheckpointError(
            f'state_dict of checkpoint {filename} is of type '
            f'{type(checkpoint["state_dict"]).__name__}; expected weights by name. Save it so.'
        )
    _forget_undefined_keys(checkpoint.get('message_hub'))
    return checkpoint


def _forget_undefined_keys(hub: object) -> None:
    """Leave out log values that were not saved, of which MMEngine would warn one by one."""
    if isinstance(hub, dict) and isinstance(hub.get('resumed_keys'), dict):
        defined = {*hub.get('log_scalars', ()), *hub.get('runtime_info', ())}
        hub['resumed_keys'] = {
            key: value for key, value in hub['resumed_keys'].items() if key in defined
        }
