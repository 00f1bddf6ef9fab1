"""The kinds of devices that tests are run on: what a job of each needs, and what it must say."""

import json
import os
import platform
import sys
from pathlib import Path

import pytest
import torch

#: A stand-in whose own backend takes its tensors alone, as NPU, MLU and MUSA cards have it.
NATIVE = 'npu'

#: Such stand-ins of :mod:`tests.native` with their backends.
NATIVE_BACKENDS = dict(npu='hccl', mlu='cncl')

needs_lazy = pytest.mark.skipif(
    not hasattr(torch._C, '_lazy_ts_backend'),
    reason='PyTorch 1.10 has no torch._lazy, in which its lazy device is',
)

#: PyTorch's own lazy device, which runs on the CPU.
LAZY = pytest.param('lazy', marks=needs_lazy)


def lazy(*values):
    """A case on PyTorch's lazy device, for ``pytest.mark.parametrize``."""
    return pytest.param(*values, marks=needs_lazy)


#: For lists of accelerators in ``pytest.mark.parametrize``: a GPU, with ``make test-cuda``.
CUDA = pytest.param('cuda', marks=pytest.mark.cuda)

#: The same: torch_xla, with ``make test-xla``.
XLA = pytest.param('xla', marks=pytest.mark.xla)

#: The same: the stand-in for a T20, which is the vendor's interface on torch_xla.
GCU = pytest.param('gcu', marks=pytest.mark.xla)


def on_xla(*values):
    """A case on torch_xla, for ``pytest.mark.parametrize``."""
    return pytest.param(*values, marks=pytest.mark.xla)


def gpus():
    """The number of GPUs that this process sees."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def backend_of(accelerator):
    """The backend of a job on an accelerator, for its ranks.

    Ranks that have a GPU each use nccl; ranks that share one use gloo, because nccl refuses two
    ranks on one GPU.
    """
    if accelerator == 'cuda':
        return 'nccl' if int(os.environ.get('WORLD_SIZE', 1)) <= gpus() else 'gloo'
    there = f'torch_{accelerator}' in sys.modules
    return {**NATIVE_BACKENDS, 'zeta': 'zccl'}.get(accelerator, 'gloo') if there else 'gloo'


def job_of(accelerator, ranks=2):
    """What :func:`tests.ranks.run_ranks` has to be told of a job on an accelerator.

    Args:
        accelerator (str): Name of the accelerator.
        ranks (int): Number of processes. Defaults to 2.

    Returns:
        dict: Keyword arguments.
    """
    if accelerator in NATIVE_BACKENDS:
        from tests.native import CARDS, native_paths

        vendor = CARDS[accelerator][0], tuple(native_paths(accelerator))
        # Gloo carries what the stand-in's backend sends.
        return dict(vendor=vendor, environ=dict(GLOO_SOCKET_IFNAME='lo'))
    if accelerator in ('xla', 'gcu'):
        paths = [str(Path(__file__).parents[1] / 'standins' / 't20')] * (accelerator == 'gcu')
        return dict(environ=dict(CPU_NUM_DEVICES=str(max(ranks, 2))), paths=paths)
    if accelerator == 'cuda' and ranks > gpus() > 1:
        first = os.environ.get('CUDA_VISIBLE_DEVICES', '0').split(',')[0]
        return dict(environ=dict(CUDA_VISIBLE_DEVICES=first))
    return {}


def device_of(accelerator, rank, ranks=2):
    """The device that a rank has to be on."""
    if accelerator == 'cpu':
        return 'cpu'
    if accelerator == 'cuda' and ranks > gpus():
        rank = 0  # the ranks share a GPU
    if accelerator == 'lazy':
        rank = 0  # each process has one device
    return f'{dict(gcu="xla").get(accelerator, accelerator)}:{rank}'


def staged(accelerator):
    """Whether gradients are averaged when backward has ended, and not by PyTorch's DDP."""
    return accelerator in ('xla', 'gcu', 'lazy')


def amp_wrapper(accelerator):
    """The class that trains with mixed precision: MMEngine's own where it knows the device."""
    own = accelerator in ('cuda', *NATIVE_BACKENDS)
    return 'AmpOptimWrapper' if own else 'DeviceAmpOptimWrapper'


def within(accelerator, tolerance):
    """A tolerance for float32; the kernels of a GPU round differently from the CPU's."""
    return max(tolerance, 1e-4) if accelerator == 'cuda' else tolerance


def write_column(accelerator, cells):
    """Write what a table of the docs says of an accelerator to the folder ``MMDEVPLUG_RESULTS``.

    Args:
        accelerator (str): Its name, and that of the JSON file.
        cells (callable): Returns the cells by row. It is called if there is such a folder.
    """
    folder = os.environ.get('MMDEVPLUG_RESULTS')
    if not folder:
        return
    column = dict(
        accelerator=accelerator,
        torch=torch.__version__,
        python=platform.python_version(),
        rows=cells(),
    )
    path = Path(folder) / f'{accelerator}.json'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(column, indent=1, ensure_ascii=False) + '\n')
