"""What the tests on pytorch_ocl run in the processes of a job: scenarios of other tests."""

from functools import partial

import tests.model.sync_bn_cases as sync_bn
from mmdevplug.accelerators import TorchNativeAccelerator
from mmdevplug.accelerators.vendor import import_vendor
from mmdevplug.registry import ACCELERATORS
from tests.checkpoint.training import train_or_die
from tests.device_guard.test_guard_legal import guarded_digits
from tests.features.rows import train_rows
from tests.jobs import train_two_epochs
from tests.parallel_jobs import train as train_spread

#: The package as it is: it does not say how many devices there are.
OPTIONS = dict(package='pytorch_ocl', device_count=1)
#: What adds functions that PyTorch itself calls.
REGISTER = 'tests.opencl.ocl_card:complete'
#: Cases of synchronized batch normalization, without those that pytorch_ocl cannot compute:
#: Intel's compiler ends the process at bfloat16, and checkpointing of PyTorch asks for autocast.
CASES = {
    name: case
    for name, case in sync_bn.CASES.items()
    if name != 'bfloat16' and not case.how.startswith('checkpointed')
}
#: Rows of the feature table.
ROWS = ['sgd', 'clip_norm', 'ema', 'sync_bn', 'unused']

# Scenarios name an accelerator by its name alone.
ACCELERATORS.register_module(name='ocl', module=partial(TorchNativeAccelerator, 'ocl', **OPTIONS))


def alone(folder):
    """What one process does."""
    import_vendor('pytorch_ocl')
    return dict(
        digits=train_two_epochs('ocl', folder / 'digits'),
        guard=guarded_digits('ocl', folder / 'guard'),
    )


def together(folder):
    """What each of two ranks does."""
    import_vendor('pytorch_ocl')
    return dict(
        digits=train_two_epochs('ocl', folder / 'digits'),
        rows=train_rows(ROWS, 'ocl', folder / 'rows'),
    )


def normalize():
    """Cases of synchronized batch normalization."""
    import_vendor('pytorch_ocl')
    sync_bn.CASES = CASES
    return sync_bn.run_all('ocl')


def segment(accelerator, folder):
    """Train a small FCN of mmseg."""
    if accelerator == 'ocl':
        import_vendor('pytorch_ocl')
    return train_spread('segmentor', accelerator, folder)


def interrupted(work_dir, stop_at=None, **options):
    """Train without dropout: pytorch_ocl has no state of its generator that could be restored."""
    import_vendor('pytorch_ocl')
    options.update(model=dict(type='NoisyModel', dropout=0.0), accelerator__register=REGISTER)
    return train_or_die('ocl', work_dir, stop_at, **options)
