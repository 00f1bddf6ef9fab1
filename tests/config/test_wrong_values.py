"""Every option of ours refuses a wrong value, and names the key, the value and what it expects."""

import pytest

from mmdevplug.accelerators import CPUAccelerator, get_accelerator
from mmdevplug.accelerators.backend import check_backend
from mmdevplug.config.accelerator import to_dict
from mmdevplug.config.model_parallel import ModelParallelOptions
from mmdevplug.config.sharding import ShardingOptions
from mmdevplug.errors import DevPlugError
from mmdevplug.model.norm_layers import check_sync_bn
from mmdevplug.patches.torch_load import trust_classes
from mmdevplug.runner.device_log_processor import DeviceLogProcessor
from tests.config.test_any_value import OPTIONS, refusal

FLAG = 'expected True or False'
DICT_OR_NONE = 'expected dict, or None.'

#: Of each option a wrong value, and the end of the message after it.
WRONG = {
    'accelerator.backend': (5, "expected 'auto' or str, or None."),
    'accelerator.compilations': (7, FLAG),
    'accelerator.host_losses': ('device', "expected 'auto', True or False."),
    'accelerator.initial_weights': ('gpu', "expected 'auto', 'host' or 'device'."),
    'accelerator.memory': (dict(interval=500), FLAG),
    'accelerator.pad_to': ('large', 'expected a number whose next multiple is taken (64), one'),
    'accelerator.preemption': ('SIGTERM', FLAG),
    'accelerator.resume_settings': ('newest', "expected 'checkpoint' or 'config'."),
    'default_hooks.checkpoint.async_save': ('yes', FLAG),
    'default_hooks.checkpoint.resumable_best': (2, FLAG),
    'launch.master_addr': ('node 0', 'expected the name or the address of host 0, or None.'),
    'launch.master_port': (70000, 'expected a port from 1 to 65535, or None.'),
    'launch.max_restarts': (-1, 'expected 0 to 10000, or None.'),
    'launch.nnodes': ('4:1', 'expected 1 or more hosts, or the least and the most, such as 1:4.'),
    'launch.node_rank': (True, 'expected a whole number of at least 0, or None.'),
    'launch.nproc': (0, "expected 1 or more processes on each host, or 'auto' for one on each"),
    'launch.timeout': (0, 'expected a finite number above 0, or None.'),
    'model_parallel.balance_threshold': (-0.1, 'expected a finite number of at least 0.'),
    'model_parallel.check_r_consistency': ('warn', FLAG),
    'model_parallel.devices': (1.5, 'expected int, str or list, or None.'),
    'model_parallel.enable': ('auto', 'expected bool, or None.'),
    'model_parallel.exclude_cpu': ('no', FLAG),
    'model_parallel.force_balance': ('never', FLAG),
    'model_parallel.guard': ('ignore', "expected 'error', 'warn', 'move' or None."),
    'model_parallel.max_memory': ('10GB', DICT_OR_NONE),
    'model_parallel.no_split': ('Block', 'expected list, or None.'),
    'model_parallel.plan': ('plan.json', DICT_OR_NONE),
    'model_parallel.precision': ('int8', "expected 'fp32', 'float32', 'bf16', 'bfloat16', 'fp16'"),
    'model_parallel.strategy': ('even', "expected 'balanced', 'dynamic' or 'auto'."),
    'model_parallel.strict_r_check': ('no', FLAG),
    'model_wrapper_cfg.bucket_cap_mb': (
        -1,
        'expected a number below 1,000,000, of at least 0, or None.',
    ),
    'model_wrapper_cfg.grad_compression': ('fp16', "expected 'none' or 'bf16'."),
    'model_wrapper_cfg.nonfinite_grads': ('skip', "expected 'stop' or 'ignore', or None."),
    'sharding.blocks': ('Block', 'expected a list of names of classes or modules, or None.'),
    'sharding.mixed_precision': ('fp16', "expected 'bf16', or None."),
    'sharding.offload': ('cpu', FLAG),
    'sharding.ranks': (0, 'expected a whole number of at least 1, or None.'),
    'sharding.reshard_after_forward': ('no', FLAG),
    'sharding.sharded_checkpoint': ('all', FLAG),
}

#: Whole keys, and arguments of classes: what reads them, a wrong value, the end of the message.
BESIDE = {
    'accelerator': (to_dict, 7, "expected a name such as 'gcu' or a dict such as"),
    'accelerator.backend': (
        lambda value: check_backend(value, CPUAccelerator(), 'accelerator.backend'),
        'glooo',
        "expected 'gloo'. Available here: ",
    ),
    'accelerator.generation': (
        lambda value: get_accelerator(dict(type='gcu', generation=value)),
        't30',
        "expected 't20' (lazy, xla:<index>), 's60' (eager, gcu:<index>), or nothing",
    ),
    'accelerator.spmd': (lambda value: get_accelerator(dict(type='xla', spmd=value)), 'yes', FLAG),
    'checkpoint_classes': (trust_classes, 'my.Class', 'expected a list of dotted names, e.g.'),
    'log_processor.average_losses': (
        lambda value: DeviceLogProcessor(average_losses=value),
        'all',
        FLAG,
    ),
    'model_parallel': (
        ModelParallelOptions.from_config,
        'yes',
        'expected a dict such as dict(enable=True, devices=2), or True or False.',
    ),
    'sharding': (ShardingOptions.from_config, 4, 'expected True, False or a dict such as'),
    'sync_bn': (check_sync_bn, 'sync', 'expected one of these: None: '),
}


def test_every_option_has_a_wrong_value():
    assert sorted(WRONG) == sorted(f'{kind.key}.{name}' for kind, name in OPTIONS)


@pytest.mark.parametrize(('kind', 'name'), OPTIONS, ids=lambda one: getattr(one, 'key', one))
def test_a_wrong_value_of_an_option_is_refused(kind, name):
    value, words = WRONG[f'{kind.key}.{name}']
    said = refusal(kind, name, value)
    assert said is not None, 'taken'
    assert said.startswith(f'{kind.key}.{name}={value!r}: {words}')


@pytest.mark.parametrize('key', list(BESIDE))
def test_a_wrong_value_of_a_key_is_refused(key):
    read, value, words = BESIDE[key]
    with pytest.raises(DevPlugError) as caught:
        read(value)
    assert str(caught.value).startswith(f'{key}={value!r}')
    assert words in str(caught.value)
