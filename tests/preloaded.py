"""What runs import sooner or later: processes that are forked from a server find it there."""

import gc
from importlib import import_module
from importlib.util import find_spec

for name in (
    'mmdevplug.accelerators.torch_native',
    'mmdevplug.checkpoint.plain_state',
    'mmdevplug.config.base_config',
    'mmdevplug.config.launch_options',
    'mmdevplug.data.same_samples',
    'mmdevplug.distributed.staged_groups',
    'mmdevplug.environments.none',
    'mmdevplug.gradients.ddp_hook',
    'mmdevplug.gradients.wrapper',
    'mmdevplug.hooks.device_hook',
    'mmdevplug.hooks.iter_timer_hook',
    'mmdevplug.hooks.memory_hook',
    'mmdevplug.hooks.phase_hook',
    'mmdevplug.hooks.preemption_hook',
    'mmdevplug.hooks.safe_checkpoint_hook',
    'mmdevplug.model.loss_path',
    'mmdevplug.model_parallel',
    'mmdevplug.patches.runner_type',
    'mmdevplug.sharding.find_blocks',
    'mmdevplug.staged.large_sums',
    'torch.distributed.algorithms.ddp_comm_hooks',
):
    import_module(name)
if find_spec('torch.utils.serialization') is not None:  # since PyTorch 2.5
    import_module('torch.utils.serialization')

# Reading their table takes longer than an epoch of most tests.
if find_spec('sklearn') is not None:
    import_module('mmdevplug.examples.digits')._read_digits()

# What is there before a fork is not looked through again by each process.
gc.freeze()
# Python's own, which standins/quick changed for these imports: ranks' memory is measured.
gc.set_threshold(700, 10, 10)
