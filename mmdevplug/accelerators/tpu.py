"""TPUs as eager devices, ``tpu``, through TorchTPU; those of torch_xla are ``xla``."""

import os
import sys
from importlib.util import find_spec
from typing import Callable, Optional

import torch

from mmdevplug.errors import AcceleratorError
from mmdevplug.registry import ACCELERATORS

from .base import privateuse1_name
from .torch_native import TorchNativeAccelerator

#: What TorchTPU's runtime reads when it starts in one of several processes: an address of each
#: process, for the network between the chips, and how the chips lie, e.g. ``'2,2,1'``.
ADDRESSES, TOPOLOGY = 'TORCH_TPU_SLICEBUILDER_ADDRESSES', 'TORCH_TPU_TOPOLOGY'
#: What its profiler needs to be equal in all processes.
SESSION = 'TORCH_TPU_XPROF_SESSION_ID'


@ACCELERATORS.register_module(name='tpu')
class TPUAccelerator(TorchNativeAccelerator):
    """Devices of TorchTPU, whose runtime gives each process one of them.

    Sophgo's cards have a package and a device type of the same names, and one process sees all.
    """

    def __init__(self) -> None:
        super().__init__('tpu', 'torch_tpu', 'tpu_dist', 'TPU_VISIBLE_CHIPS')

    def _is_torchtpu(self) -> bool:
        if self._module() is None or 'torch_tpu' not in sys.modules:
            return False
        return find_spec('torch_tpu._internal') is not None

    def _is_started(self) -> bool:
        return self._is_torchtpu() and self._module().is_initialized()

    def _is_registered(self) -> bool:
        # TorchTPU has its module without a TPU, too, and no device then.
        if self._is_torchtpu():
            return privateuse1_name() == self.device_type
        return super()._is_registered()

    def requirement(self) -> str:
        return (
            'the package torch_tpu and a TPU of this host; PyTorch must be free to load the '
            'package (TORCH_DEVICE_BACKEND_AUTOLOAD not 0)'
        )

    def device_count(self) -> int:
        # Before its runtime starts, TorchTPU counts the devices of the host.
        return 1 if self._is_started() else super().device_count()

    def device(self, local_rank: int = 0) -> torch.device:
        if not self._is_torchtpu() or local_rank < 0:
            return super().device(local_rank)
        if not self._is_started():
            super().device(local_rank)  # refuses a rank without a device
            self._fill_in_environment()
        return self.current_device()

    def hardware_id(self, device: torch.device) -> Optional[str]:
        # Each process has one device of its own.
        return str(os.getpid()) if self._is_torchtpu() else super().hardware_id(device)

    def memory_total(self, device: torch.device) -> Optional[int]:
        try:
            return super().memory_total(device)
        except RuntimeError as error:  # of a chip that TorchTPU has no figure for
            if 'cannot determine device memory' not in str(error):
                raise
            return None

    def _generic(self, function: str) -> Optional[Callable]:
        # TorchTPU refers to torch.accelerator.random, which PyTorch 2.13 does not have.
        if function == 'get_rng_state' and self._is_torchtpu():
            return lambda index=0: self._module().default_generators[index].get_state()
        return super()._generic(function)

    def _fill_in_environment(self) -> None:
        """Set what TorchTPU's runtime reads, the same in all ranks of a host."""
        ranks = int(os.environ.get('WORLD_SIZE', '1'))
        if ranks == 1:
            return
        addresses = os.environ.get(ADDRESSES)
        on_one_host = os.environ.get('LOCAL_WORLD_SIZE') == str(ranks)
        if addresses is None and on_one_host:
            # The ports that follow the one of the job, which torchrun or the user has chosen.
            port = int(os.environ['MASTER_PORT'])
            first = port + 1 if port + ranks < 65536 else port - ranks
            addresses = ','.join(f'localhost:{first + rank}' for rank in range(ranks))
            os.environ[ADDRESSES] = addresses
        if addresses is None or len(addresses.split(',')) != ranks:
            found = 'not set' if addresses is None else repr(addresses)
            raise AcceleratorError(
                f'{ADDRESSES} is {found}, but WORLD_SIZE={ranks}: TorchTPU expects an address and '
                f'port of each process, e.g. 10.0.0.1:8471,10.0.0.2:8471. It is filled in where '
                f'all processes run on one host; set it to the same value in all of them, and '
                f'{TOPOLOGY}.'
            )
        if TOPOLOGY in os.environ:
            return
        if on_one_host:
            os.environ.setdefault(SESSION, os.environ['MASTER_PORT'])
        try:
            if not on_one_host:
                raise ValueError('what TorchTPU finds describes one host')
            self._module().distributed.set_tpu_launch_env(nnodes=1, nproc_per_node=ranks)
        except (AttributeError, ImportError, RuntimeError, ValueError) as error:
            raise AcceleratorError(
                f'{TOPOLOGY} is not set, and TorchTPU knows none for WORLD_SIZE={ranks} '
                f"({type(error).__name__}: {error}). Set it to how the chips lie, e.g. '2,2,1', "
                f'or start as many processes as this host has chips.'
            ) from error
