"""Read a checkpoint without running what is inside it."""

import os
from typing import Any, Dict

import torch
from mmengine.runner import CheckpointLoader

from mmdevplug.errors import CheckpointError, DevPlugError
from mmdevplug.patches.torch_load import safe_loading


def read_checkpoint(filename: str, map_location: Any = 'cpu') -> Dict[str, Any]:
    """Read a checkpoint from a path, or an address that MMEngine knows (``https://``, ...).

    A file that is no checkpoint, or holds classes other than MMEngine's, raises CheckpointError.
    """
    filename = os.path.expanduser(str(filename))
    try:
        with safe_loading(filename):
            if not os.path.isfile(filename):
                return CheckpointLoader.load_checkpoint(filename, map_location)
            return torch.load(filename, map_location=map_location)
    except (RuntimeError, EOFError, ValueError) as error:
        if isinstance(error, DevPlugError) or not os.path.isfile(filename):
            raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f'checkpoint {filename} cannot be read: {reason}. It is truncated, damaged or no '
            f'checkpoint of PyTorch; take the one before it.'
        ) from error
