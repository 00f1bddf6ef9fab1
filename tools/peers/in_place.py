"""Put ``staged`` in gloo's place before PyTorch's tests are imported: a pytest plugin."""

import sys
from importlib import import_module
from pathlib import Path

import torch
from torch import distributed as torch_dist
from torch.distributed import distributed_c10d as c10d
from torch.testing._internal.common_distributed import MultiProcessTestCase


class StagedInPlace:
    """Make groups of ``staged`` where a test asks for gloo, or names no backend.

    Args:
        device (str): ``'cpu'``, or the name of a stand-in card, which then is the device of all
            tensors for which a test names none.
    """

    def __init__(self, device):
        self.device = device

    def pytest_configure(self):
        """Replace it in the process that runs a file."""
        from mmdevplug.staged import StagedProcessGroup

        replace_groups(StagedProcessGroup)
        if self.device != 'cpu':
            sys.path.insert(0, str(Path(__file__).parents[2] / 'standins' / 'fakecard'))
            import_module('card').install(self.device, 8)
            run_test = MultiProcessTestCase.run_test

            def run_on_card(case, *args):
                torch.set_default_device(torch.device(self.device, 0))
                return run_test(case, *args)

            MultiProcessTestCase.run_test = run_on_card


def replace_groups(group):
    """Make groups of another class, by name and by class."""
    make, gloo = c10d._new_process_group_helper, torch_dist.ProcessGroupGloo

    def make_staged(size, rank, ranks, backend, *args, **kwargs):
        asked = str(backend).lower()
        if asked in ('none', 'undefined') or 'gloo' in asked:
            backend = torch_dist.Backend('staged')
        return make(size, rank, ranks, backend, *args, **kwargs)

    class InPlace(gloo):
        def __new__(cls, store, rank, size, options):
            if sys._getframe(1).f_globals['__name__'].startswith('mmdevplug.'):
                return gloo(store, rank, size, options)
            return group(store, rank, size, getattr(options, '_timeout', options))

    c10d._new_process_group_helper = make_staged
    torch_dist.ProcessGroupGloo = InPlace
