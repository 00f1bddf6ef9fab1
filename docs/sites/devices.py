"""What the checks ask of a kind of device: how it begins, its tensors, and what can be counted."""

import os
import sys
from pathlib import Path

import torch

from tests.columns import NATIVE_BACKENDS, backend_of

T20_STANDIN = str(Path(__file__).parents[2] / 'standins' / 't20')

#: A device that shows how an entry of the visible-devices variable becomes a name.
VISIBLE = dict(
    zeta='ZETA_VISIBLE_DEVICES', gcu='TOPS_VISIBLE_DEVICES', npu='ASCEND_RT_VISIBLE_DEVICES'
)


def environ_of(name):
    """Variables of a job on this kind of device."""
    variables = dict(no_proxy='127.0.0.1')
    if name == 'xla':
        variables['CPU_NUM_DEVICES'] = '2'
    if name in VISIBLE:
        variables[VISIBLE[name]] = '6,7'
    return variables


def begin(name):
    """Bring the device up, as the import of a vendor's package does."""
    if name == 'gcu':
        sys.path.insert(0, T20_STANDIN)
        import torch_gcu  # noqa: F401
    elif name == 'xla':
        import torch_xla  # noqa: F401
    elif name != 'cpu' and name not in NATIVE_BACKENDS:  # of which MMEngine imports the package
        import card

        card.install(name)
    if device_type(name) == 'xla':
        # Autograd counts devices at the first backward pass, and MMEngine's is on the CPU.
        torch.zeros(1, device='xla')


def accelerator_config(name):
    """The key ``accelerator`` of a config."""
    if name == 'zeta':
        return dict(type=name, backend='gloo', visible_devices_env=VISIBLE[name])
    return dict(type=name, backend=backend_of(name))


def device_type(name):
    return 'xla' if name == 'gcu' else name


def rank_device_of(name):
    """This rank's device, without asking the package under test."""
    kind = device_type(name)
    return torch.device('cpu') if kind == 'cpu' else torch.device(kind, int(os.environ['RANK']))


class Counted:
    """Counts the calls of a function of a module."""

    def __init__(self, module, name):
        self.calls = 0
        self._function = getattr(module, name)
        setattr(module, name, self)

    def __call__(self, *args, **kwargs):
        self.calls += 1
        return self._function(*args, **kwargs)


class Waits:
    """Counts how often the host waited for the device."""

    def __init__(self, name):
        self._counted = None
        if name == 'xla':
            import torch_xla.core.xla_model as xm

            self._counted = Counted(xm, 'wait_device_ops')
        elif name == 'gcu':
            import torch_gcu

            self._counted = Counted(torch_gcu, 'synchronize')
        elif name != 'cpu':
            self._counted = Counted(getattr(torch, name), 'synchronize')

    @property
    def calls(self):
        return 0 if self._counted is None else self._counted.calls


def executions(name):
    """How many graphs the device has run; 0 where there are none."""
    if device_type(name) != 'xla':
        return 0
    import torch_xla
    from torch_xla.debug import metrics

    # They are counted when done. `xm.wait_device_ops`, which calls this, is counted itself.
    torch_xla._XLAC._xla_wait_device_ops([])
    return (metrics.metric_data('ExecuteTime') or [0])[0]


def drawn(device):
    """Random numbers of the device's own generator."""
    return torch.rand(4, device=device).cpu().tolist()
