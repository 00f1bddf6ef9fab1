"""Named and shaped like Ascend's package, for tests: see native_card."""

import os
import sys
import types

import native_card
import torch

__version__ = '0.0.0+standin'

npu = native_card.install(native_card.NPU)


def _gather(tensor, gather_list=None, dst=0, group=None, async_op=False, group_dst=None):
    """Gather with an all-gather, as torch_npu replaces PyTorch's gather."""
    distributed = torch.distributed
    if tensor.device.type != 'npu':
        return _torch_gather(tensor, gather_list, dst, group, async_op)
    everything = gather_list or [
        torch.empty_like(tensor) for _ in range(distributed.get_world_size(group))
    ]
    return distributed.all_gather(everything, tensor, group=group, async_op=async_op)


_torch_gather = torch.distributed.gather
torch.distributed.gather = torch.distributed.distributed_c10d.gather = _gather
torch.distributed.is_hccl_available = lambda: True

npu.utils = types.ModuleType('torch_npu.npu.utils')
# The number of the chip, which MMEngine asks for: 220 and more compute in full precision.
npu.utils.get_soc_version = lambda: 223
npu.utils.is_bf16_supported = npu.is_bf16_supported
npu.utils.synchronize, npu.utils.set_device = npu.synchronize, npu.set_device
npu.is_jit_compile_false = lambda: not npu.jit_compile
npu.jit_compile = True


def _set_compile_mode(jit_compile=False):
    npu.jit_compile = jit_compile


npu.set_compile_mode = _set_compile_mode
# Old releases lack it; in others it needs a runtime that has started.
_fault = os.environ.get('NPU_COMPILE_MODE')
if _fault == 'missing':
    del npu.set_compile_mode
elif _fault == 'early':
    _chosen = []
    _set_device = npu.set_device

    def _choose_device(device):
        _set_device(device)
        _chosen.append(device)

    def _set_compile_mode_late(jit_compile=False):
        if not _chosen:
            raise RuntimeError('SetOption: the runtime is not initialized')
        _set_compile_mode(jit_compile)

    npu.set_device, npu.set_compile_mode = _choose_device, _set_compile_mode_late
npu.set_option = lambda option: None
sys.modules['torch.npu'] = sys.modules['torch_npu.npu'] = npu
sys.modules['torch_npu.npu.utils'] = npu.utils
sys.modules['torch.npu.amp'] = sys.modules['torch_npu.npu.amp'] = npu.amp
