"""TPUs as eager devices, ``tpu``, through TorchTPU; those of torch_xla are ``xla``."""

import os
import sys
from importlib import import_module
from importlib.util import find_spec

import torch

from mmdevplug.errors import AcceleratorError
from mmdevplug.registry import ACCELERATORS

from .torch_native import TorchNativeAccelerator

#: What TorchTPU's runtime reads when it starts in one of several processes: an address of each
#: process, for the network between the chips, and how the chips lie, e.g. ``'2,2,1'``.
ADDRESSES, TOPOLOGY = 'TORCH_TPU_SLICEBUILDER_ADDRESSES', 'TORCH_TPU_TOPOLOGY'
#: TorchTPU's module that knows the topologies of a host.
_LAUNCHER = 'torch_tpu._internal.distributed.launchers.singlehost_wrapper'


@ACCELERATORS.register_module(name='tpu')
class TPUAccelerator(TorchNativeAccelerator):
    """Devices of TorchTPU, whose runtime gives each process one of them.

    Sophgo's cards have a package and a device type of the same names, and one process sees all.
    """

    def __init__(self) -> None:
        super().__init__('tpu', 'torch_tpu', 'tpu_dist', 'TPU_VISIBLE_CHIPS')

    def _gives_one_device(self) -> bool:
        if self._module() is None or 'torch_tpu' not in sys.modules:
            return False
        return find_spec('torch_tpu._internal') is not None

    def device_count(self) -> int:
        # Before its runtime starts, TorchTPU counts the devices of the host.
        started = self._gives_one_device() and self._module().is_initialized()
        return 1 if started else super().device_count()

    def device(self, local_rank: int = 0) -> torch.device:
        if not self._gives_one_device() or local_rank < 0:
            return super().device(local_rank)
        if not self._module().is_initialized():
            super().device(local_rank)  # refuses a rank without a device
            _fill_in_environment()
        return self.current_device()


def _fill_in_environment() -> None:
    """Set what TorchTPU's runtime reads, the same in all ranks of a host."""
    ranks = int(os.environ.get('WORLD_SIZE', '1'))
    if ranks == 1:
        return
    addresses = os.environ.get(ADDRESSES)
    if addresses is None and os.environ.get('LOCAL_WORLD_SIZE') == str(ranks):
        # The ports that follow the one of the job, which torchrun or the user has chosen.
        port = int(os.environ['MASTER_PORT'])
        first = port + 1 if port + ranks < 65536 else port - ranks
        addresses = ','.join(f'localhost:{first + rank}' for rank in range(ranks))
        os.environ[ADDRESSES] = addresses
    if addresses is None or len(addresses.split(',')) != ranks:
        found = 'not set' if addresses is None else repr(addresses)
        raise AcceleratorError(
            f'{ADDRESSES} is {found}, but WORLD_SIZE={ranks}: TorchTPU expects an address and '
            f'port of each process, e.g. 10.0.0.1:8471,10.0.0.2:8471. It is filled in where all '
            f'processes run on one host; set it to the same value in all of them, and {TOPOLOGY}.'
        )
    if TOPOLOGY not in os.environ:
        try:
            import_module(_LAUNCHER).prepare_tpu_environment(ranks)
        except (AttributeError, ImportError, RuntimeError, ValueError) as error:
            raise AcceleratorError(
                f'{TOPOLOGY} is not set, and TorchTPU knows none for WORLD_SIZE={ranks} '
                f"({type(error).__name__}: {error}). Set it to how the chips lie, e.g. '2,2,1', "
                f'or start as many processes as this host has chips.'
            ) from error
