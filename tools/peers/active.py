"""Make mmdevplug active before MMEngine's tests are imported: a pytest plugin."""

import os

import pytest
import torch
from torch.testing._internal import common_distributed


def activate(device):
    """Put DeviceRunner in the place of MMEngine's Runner, on a device for all that names none.

    Args:
        device (str): ``'cpu'``, ``'xla'`` or the name of a stand-in.
    """
    os.environ['MMDEVPLUG_ACCELERATOR'] = device

    import mmengine.runner as package
    import mmengine.runner.runner as module
    from mmengine.registry import RUNNERS

    import mmdevplug  # noqa: F401  registers DeviceRunner

    runner = RUNNERS.get('DeviceRunner')
    package.Runner = module.Runner = RUNNERS.module_dict['Runner'] = runner


def share_processes():
    """Let tests of several ranks fork their ranks, which so have everything that is active here.

    Processes that are spawned import the test alone, and none of this.
    """
    from mmengine.testing import _internal

    for case in (common_distributed.MultiProcessTestCase, _internal.MultiProcessTestCase):
        case._spawn_processes = _fork


def _fork(case):
    case._start_processes(torch.multiprocessing.get_context('fork').Process)


class Active:
    """Serve MMEngine's functions in each test; name this device's backend where a test says CUDA.

    Args:
        device (str): As in :func:`activate`.
    """

    def __init__(self, device):
        self.device = device
        common_distributed.DistributedTestBase.create_pg = self._create_group

    @pytest.fixture(autouse=True)
    def _serve(self, request):
        from mmengine.visualization import Visualizer

        import mmdevplug
        from mmdevplug.accelerators import device_context

        # Ranks are forked from here: a lazy device must not have started before.
        if hasattr(request.cls, '_start_processes'):
            yield
            return
        mmdevplug.patch_mmengine()
        before = device_context()
        yield
        # MMEngine names them by the second, so the next test may begin with one whose folder is
        # deleted. Its tests do the same with loggers.
        Visualizer._instance_dict.clear()
        context = device_context()
        if context is not None and context is not before:
            assert context.device.type == self.device
            request.node.user_properties.append(('runner_on', context.device.type))

    @staticmethod
    def _create_group(case, device, world_size=None):
        """Start the process group that the test asks for with ``'cuda'``, on the device here."""
        import mmdevplug
        from mmdevplug.accelerators.backend import default_backend

        mmdevplug.patch_mmengine()
        accelerator = mmdevplug.get_accelerator()
        accelerator.set_device(accelerator.device(case.rank))
        torch.distributed.init_process_group(
            default_backend(accelerator),
            rank=case.rank,
            world_size=world_size or case.world_size,
            store=torch.distributed.FileStore(case.file_name, world_size or case.world_size),
        )
