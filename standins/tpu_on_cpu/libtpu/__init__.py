"""Stands in for libtpu, TorchTPU's runtime: XLA for the CPU computes instead of a TPU.

TorchTPU registers its device where TPUs are on the PCI bus; with ``TPU_ON_CPU=1`` it finds four,
of which each process has one.
"""

import os
from importlib.util import find_spec
from pathlib import Path


def configure_library_path() -> None:
    """Tell TorchTPU where its runtime is, as Google's libtpu does when TorchTPU is imported."""
    (folder,) = find_spec('lammps_jax_pjrt_cpu').submodule_search_locations
    os.environ['CPU_PJRT_PLUGIN'] = str(Path(folder) / 'pjrt_c_api_cpu_plugin.so')
    (plugin,) = Path(__file__).parent.glob('plugin*.so')
    os.environ['TPU_LIBRARY_PATH'] = str(plugin)
    if os.environ.get('TPU_ON_CPU') != '1':
        return

    from torch_tpu._internal import public_api
    from torch_tpu._internal.utils import hardware

    hardware._scan_pci_tpus = lambda: (4, hardware._V4_TOPOLOGY)
    exports = public_api._PUBLIC_MODULES['torch.tpu.distributed'].exports
    exports['set_tpu_launch_env'] = 'libtpu:set_tpu_launch_env'


def set_tpu_launch_env(**options: int) -> None:
    """Call TorchTPU's own, then start the runtime as that of a job of one process.

    XLA for the CPU has no network between chips, and the runtime reads the variables of a job when
    it starts.
    """
    import torch
    from torch_tpu._internal.distributed import distributed

    distributed.set_tpu_launch_env(**options)
    job = {name: os.environ.pop(name, None) for name in ('WORLD_SIZE', 'RANK', 'LOCAL_RANK')}
    torch.ones(1, device='tpu').cpu()
    os.environ.update({name: value for name, value in job.items() if value is not None})
