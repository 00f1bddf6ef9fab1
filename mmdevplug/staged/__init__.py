"""A backend of torch.distributed for devices that have none.

``import mmdevplug.staged`` registers it and does nothing else. Then
``torch.distributed.init_process_group('staged')`` makes groups whose collectives take tensors of
the host and of every device that can copy to it: gloo moves their copies between the ranks.
PyTorch's DistributedDataParallel, its optimizers and other programs need no change, nor does this
module need MMEngine. It needs PyTorch 2.0 or later.
"""

from .staged_group import StagedProcessGroup, register

__all__ = ['StagedProcessGroup', 'register']

register()
