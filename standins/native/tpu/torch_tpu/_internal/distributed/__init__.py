"""The launch variables, as TorchTPU 0.2 fills in what the user has not set; see torch_tpu."""

import os
import time

_KNOWN = {2: '1,2,1', 4: '2,2,1'}
_PORT = 8070


def set_tpu_launch_env(*, nnodes=None, nproc_per_node=None):
    """Set what is not set, on one host."""
    os.environ.setdefault('TORCH_TPU_XPROF_SESSION_ID', str(time.time_ns()))
    hosts = [name for name in os.environ.get('TPU_WORKER_HOSTNAMES', '').split(',') if name]
    if nnodes is not None and hosts and nnodes != len(hosts):
        raise ValueError(
            'set_tpu_launch_env(): expected nnodes to match the number of hosts in environment '
            f'variable TPU_WORKER_HOSTNAMES ({len(hosts)}), got {nnodes}'
        )
    count = nproc_per_node or 4
    if count not in _KNOWN:
        raise RuntimeError(f'No TPU topology found for count: {count}')
    addresses = ','.join(f'localhost:{_PORT + rank}' for rank in range(count))
    os.environ.setdefault('TORCH_TPU_SLICEBUILDER_ADDRESSES', addresses)
    os.environ.setdefault('TORCH_TPU_TOPOLOGY', _KNOWN[count])
