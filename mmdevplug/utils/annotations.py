"""Types of several classes for annotations, which import none of them."""

from typing import TYPE_CHECKING, Optional, Union

if TYPE_CHECKING:
    import mmengine.optim
    import torch
    from mmengine.runner import Runner as AnyRunner
else:
    AnyRunner = 'mmengine.runner.Runner'

AnyOptimWrapper = Union['mmengine.optim.OptimWrapper', 'mmengine.optim.OptimWrapperDict']
#: None is the group of all ranks. PyTorch can be built without torch.distributed.
AnyGroup = Optional['torch.distributed.ProcessGroup']
