"""The topologies of a host, as TorchTPU fills them in where the user has not."""

import os

_KNOWN = {2: '1,2,1', 4: '2,2,1'}


def prepare_tpu_environment(world_size=None):
    """Set what is not set."""
    if world_size not in _KNOWN:
        raise RuntimeError(f'No TPU topology found for count: {world_size}')
    os.environ.setdefault('TORCH_TPU_TOPOLOGY', _KNOWN[world_size])
