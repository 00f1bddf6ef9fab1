"""Types of several classes for annotations, which import none of them."""

from typing import TYPE_CHECKING, Any, Dict, Mapping, Optional, Protocol, Union

if TYPE_CHECKING:
    import mmengine.optim
    import torch
    from mmengine.config import Config, ConfigDict
    from mmengine.hooks import Hook as AnyHook
    from mmengine.optim.scheduler.param_scheduler import _ParamScheduler as AnyScheduler
    from mmengine.runner import BaseLoop as AnyLoop, Runner as AnyRunner
else:
    Config, ConfigDict = 'mmengine.config.Config', 'mmengine.config.ConfigDict'
    AnyHook = 'mmengine.hooks.Hook'
    #: MMEngine promises ``run()`` alone; see :mod:`mmdevplug.utils.loops`.
    AnyLoop = 'mmengine.runner.BaseLoop'
    AnyRunner = 'mmengine.runner.Runner'
    AnyScheduler = 'mmengine.optim.scheduler.param_scheduler._ParamScheduler'

#: A config, or a dict within one.
AnyConfig = Union[Config, ConfigDict]
AnyOptimWrapper = Union['mmengine.optim.OptimWrapper', 'mmengine.optim.OptimWrapperDict']
#: None is the group of all ranks. PyTorch can be built without torch.distributed.
AnyGroup = Optional['torch.distributed.ProcessGroup']
#: What ``state_dict()`` returns, and who only passes it on takes: values by their names.
StateDict = Dict[str, object]
#: A state that is loaded; its values are of the types that :attr:`state_types` says.
SavedState = Mapping[str, Any]
#: What a file of MMEngine's holds: ``state_dict``, ``optimizer``, ``meta``, ``message_hub`` ...
Checkpoint = Dict[str, Any]


class Stateful(Protocol):
    """What can be saved and restored: a loader, a hook, an optimizer, a scheduler."""

    def state_dict(self) -> object:
        """Return numbers, strings, tensors and containers of these."""

    def load_state_dict(self, __state: Any) -> object:
        """Take what :meth:`state_dict` returned in an earlier run."""
