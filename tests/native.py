"""Running functions on stand-ins for devices whose collective backend takes their tensors alone.

    from tests.native import run_native

    def train(work_dir):                         # in any test module
        return train_digits('npu', work_dir)

    @needs_native
    def test_digits(tmp_path):
        results = run_native('npu', train, 2, str(tmp_path))

Each rank is a process in which ``torch_npu`` was imported before MMEngine, as MMEngine imports it
where it is installed: ``mmengine.device.is_npu_available()`` is true, the current device belongs
to nobody yet, ``init_process_group('hccl')`` makes a group that refuses host tensors. The names
are those in :data:`CARDS`. Processes that tests start by themselves (``subprocess``) get
``native_environment(name)``.
"""

import os

import card
import pytest

from tests.jobs import LEAN, ROOT
from tests.ranks import run_ranks

STANDINS = ROOT / 'standins'

#: For each device type the vendor's package and its backend.
CARDS = dict(
    npu=('torch_npu', 'hccl'),
    mlu=('torch_mlu', 'cncl'),
    zeta=('torch_zeta', 'zccl'),
    sdaa=('torch_sdaa', 'tccl'),
    neuron=('torch_neuronx', 'neuron'),
    tpu=('torch_tpu', 'tpu_dist'),
)

needs_native = pytest.mark.skipif(card.MISSING is not None, reason=str(card.MISSING))


def native_paths(name):
    """The folders that a process needs on its path to find a vendor's package."""
    native = STANDINS / 'native'
    return [str(path) for path in (native / name, native, STANDINS / 'fakecard')]


def native_environment(name, **variables):
    """The environment of a process that starts afresh on a machine with such cards.

    Args:
        name (str): One of :data:`CARDS`.
        **variables: More variables.

    Returns:
        dict: All of this process's variables and these, for ``subprocess.run(env=...)``.
    """
    paths = [*native_paths(name), str(ROOT), *LEAN]
    before = os.environ.get('PYTHONPATH')
    paths += [before] if before else []
    return {**os.environ, 'PYTHONPATH': os.pathsep.join(paths), **variables}


def run_native(name, function, world_size, *args, **options):
    """Call a function in every rank of a job on a machine with such cards.

    Args:
        name (str): One of :data:`CARDS`.
        function (callable): A function of a module.
        world_size (int): Number of processes; 0 for one process without launch variables.
        **options: See :func:`tests.ranks.run_ranks`.

    Returns:
        list: What each rank returned.
    """
    package, _ = CARDS[name]
    return run_ranks(
        function, world_size, *args, vendor=(package, tuple(native_paths(name))), **options
    )
