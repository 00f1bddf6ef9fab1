"""Rows about vendors' backends, on a stand-in card named ``npu`` and a backend ``zccl``.

MMEngine knows the name of the card and its backend ``hccl``, but not ``zccl``, which takes no
tensors of the host, as vendors' backends do not.
"""

import os
import sys
from types import ModuleType

from mmengine.device import utils as device_utils
from mmengine.dist import init_dist
from torch import distributed as torch_dist

from docs.sites.devices import rank_device_of
from docs.sites.stock import attempt, objects, sums
from mmdevplug import init_device
from tests.jobs import install_card

CARD = 'npu'


def run_vendor(ports):
    """Rows 3, 5 and 6.

    Args:
        ports (list): One for each process group after the first.

    Returns:
        dict: ``stock`` and ``ours``, each by row.
    """
    install_card(CARD)  # of which MMEngine is told below
    # What MMEngine finds where the vendor's package is installed.
    sys.modules['torch_npu'] = ModuleType('torch_npu')
    device_utils.IS_NPU_AVAILABLE = True
    torch_dist.Backend.register_backend('zccl', _group, devices=[CARD])
    stock = {3: attempt(init_dist, 'pytorch', backend='gloo')}
    # The attempt has left a store at the first port.
    os.environ['MASTER_PORT'] = str(ports[0])
    torch_dist.init_process_group('zccl')
    device = rank_device_of(CARD)
    stock[5], stock[6] = attempt(sums, device), attempt(objects)
    torch_dist.destroy_process_group()

    os.environ['MASTER_PORT'] = str(ports[1])
    context = init_device('pytorch', CARD, backend='gloo')
    ours = {
        3: dict(backend=torch_dist.get_backend(), device=str(context.device), sums=sums(device))
    }
    torch_dist.barrier()
    torch_dist.destroy_process_group()

    os.environ['MASTER_PORT'] = str(ports[2])
    init_device('pytorch', dict(type=CARD, native_backend='zccl'), backend='zccl')
    ours[5], ours[6] = attempt(sums, device), attempt(objects)
    return dict(stock=stock, ours=ours)


def _group(store, rank, size, timeout):
    return torch_dist.ProcessGroupGloo(store, rank, size, timeout)
