"""How the gradients of a wrapped model are averaged: by PyTorch's DDP, or when backward has ended.

The wrapper decides once which of the two it is, and asks no more.
"""

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Callable, Dict, Optional, Tuple

import torch
from mmengine.model import MMDistributedDataParallel
from torch import distributed as torch_dist, nn

from mmdevplug.accelerators import Accelerator
from mmdevplug.accelerators.backend import suits_native_ddp
from mmdevplug.config.model_wrapper import WrapperOptions
from mmdevplug.distributed.coalesced import broadcast_tensors
from mmdevplug.distributed.nonfinite import FinitePolicy
from mmdevplug.errors import ModelError
from mmdevplug.utils.annotations import AnyGroup, AnyOptimWrapper

from .ddp_hook import BucketAveraging
from .lazy_staging import LazyStaging
from .own_step import average_gradients
from .trainable_set import TrainableSet
from .unused_parameters import refuse_unreduced
from .wrapper_arguments import ddp_arguments, suits_ddp


@dataclass
class Setting:
    """What both kinds of averaging need to know.

    Attributes:
        accelerator (Accelerator): That of the model.
        device (torch.device): The first one of the model in this rank.
        group (ProcessGroup): Averages the gradients.
        users_group (ProcessGroup, optional): The group that was asked for; None is all ranks.
        on_host (bool): Whether ``group`` averages in host memory.
        policy (FinitePolicy): For NaN.
        options (WrapperOptions): The wrapper's own options.
        find_unused (bool): Whether parameters may go unused, as DDP has to know.
    """

    accelerator: Accelerator
    device: torch.device
    group: Any
    users_group: AnyGroup
    on_host: bool
    policy: FinitePolicy
    options: WrapperOptions
    find_unused: bool

    @property
    def compress(self) -> bool:
        """Whether gradients travel as bfloat16."""
        return self.options.grad_compression == 'bf16'


def choose_averaging(
    accelerator: Accelerator,
    device: torch.device,
    process_group: AnyGroup,
    options: WrapperOptions,
    find_unused: bool,
) -> 'Averaging':
    """Choose how to average gradients of a device over a group; None is the group of all ranks."""
    group = torch_dist.group.WORLD if process_group is None else process_group
    on_host = device.type == 'cpu' or not suits_native_ddp(accelerator, device, group)
    users_group = None if group is torch_dist.group.WORLD else group
    if on_host:
        from mmdevplug.distributed.staged_groups import staged_counterpart

        group = staged_counterpart(group)
    stops = on_host if options.nonfinite_grads is None else options.nonfinite_grads == 'stop'
    policy = FinitePolicy(stops, process_group)
    setting = Setting(
        accelerator, device, group, users_group, on_host, policy, options, find_unused
    )
    taken = accelerator.gloo_takes_tensors or suits_ddp(find_unused)
    staged = on_host and (accelerator.compilation.lazy or not taken)
    return StagedAveraging(setting) if staged else DDPAveraging(setting)


class Averaging(ABC):
    """Averages the gradients of a wrapper, which passes itself to each method."""

    #: Whether the wrapper sends the weights of rank 0 before it moves them.
    sends_weights = False

    #: Averages through host memory when backward has ended; None where DDP averages.
    staging: Optional[LazyStaging] = None
    #: The communication hook of the user, with its state.
    users_hook: Optional[Tuple[object, Callable]] = None

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        #: Whether parameters may go unused.
        self.tolerates_unused = setting.find_unused

    @abstractmethod
    def init(self, wrapper: Any, module: nn.Module, **arguments: object) -> None:
        """Set what DDP's constructor sets, for a module that is on its device."""

    def start(self, wrapper: object, trained: TrainableSet) -> None:
        """Average the gradients of these parameters from here on."""

    @abstractmethod
    def restart(self, wrapper: object, trained: TrainableSet) -> None:
        """Average the gradients of other parameters than before from here on."""

    def before_forward(self, wrapper: object) -> None:
        """Raise ModelError if the last backward pass left gradients that are not averaged."""

    @abstractmethod
    def forward(self, wrapper: object, *inputs: object, **kwargs: object) -> object:
        """Call the module, so that its backward pass averages."""

    @abstractmethod
    def average(self, trained: TrainableSet) -> None:
        """Average now, for a model that decides by itself when gradients are complete."""

    def before_update(self, optim_wrapper: AnyOptimWrapper) -> None:
        """Tell an optimizer wrapper what it has to know of the averages."""

    def warm_up(self, wrapper: object, data: object, optim_wrapper: AnyOptimWrapper) -> None:
        """Do what decides the order of sums, before a resumed training adds up its first."""

    def check_method(self, name: str) -> None:
        """Raise ModelError for a method of DDP that cannot work."""

    def take_hook(self, hook: Tuple[object, Callable]) -> None:
        """Note a communication hook of the user, with its state."""


class DDPAveraging(Averaging):
    """PyTorch's DDP averages, over the device's own backend or over ``staged``."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._arguments: Dict[str, object] = {}
        #: Whether our hook is to average; DDP takes only one, before its first forward pass.
        self._hook_is_ours = setting.on_host or setting.policy.active or setting.compress
        self._hook_is_due = self._hook_is_ours

    def init(self, wrapper: object, module: nn.Module, **arguments: object) -> None:
        """See :meth:`Averaging.init`."""
        setting = self.setting
        if setting.options.bucket_cap_mb is not None:
            arguments['bucket_cap_mb'] = setting.options.bucket_cap_mb
        shares = setting.on_host and not setting.compress
        self._arguments = ddp_arguments(
            arguments, setting.accelerator, module, setting.device, setting.on_host, shares
        )
        MMDistributedDataParallel.__init__(wrapper, module, **self._arguments)

    def restart(self, wrapper: Any, trained: TrainableSet) -> None:
        """Build PyTorch's DDP anew, for the parameters that the module has now."""
        if getattr(getattr(wrapper, '_join_config', None), 'enable', False):
            raise ModelError(
                f'parameters of {type(wrapper.module).__name__} began or ceased to be trained '
                f'inside join(), whose other ranks may have ended. Change them before or after it.'
            )
        # What nn.Module keeps of this wrapper, its mode and its hooks, and what others have set.
        names = 'detect_anomalous_params', 'require_backward_grad_sync'
        kept = {name: vars(wrapper)[name] for name in (*vars(nn.Module()), *names)}
        # The hooks of a reducer go with it.
        wrapper.reducer = wrapper.logger = None
        buffers = [(buffer, buffer.clone()) for buffer in trained.kept_buffers]
        with trained.requiring_gradients():
            MMDistributedDataParallel.__init__(wrapper, wrapper.module, **self._arguments)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)  # DDP has sent those of rank 0
        vars(wrapper).update(kept)
        self._hook_is_due = self._hook_is_ours
        if self.users_hook is not None:
            MMDistributedDataParallel.register_comm_hook(wrapper, *self.users_hook)

    def before_forward(self, wrapper: Any) -> None:
        """See :meth:`Averaging.before_forward`."""
        refuse_unreduced(wrapper)

    def forward(self, wrapper: Any, *inputs: object, **kwargs: object) -> object:
        """See :meth:`Averaging.forward`."""
        if self._hook_is_due:
            self._hook_is_due = False
            averaging = BucketAveraging(
                wrapper._trainable.named,
                self.setting.group,
                self.setting.compress,
                self.setting.policy,
                waits_inside=getattr(wrapper, 'static_graph', False),
            )
            MMDistributedDataParallel.register_comm_hook(wrapper, None, averaging.hook)
        return MMDistributedDataParallel.forward(wrapper, *inputs, **kwargs)

    def average(self, trained: TrainableSet) -> None:
        """See :meth:`Averaging.average`."""
        average_gradients(trained.named, self.setting.users_group, self.setting.policy)

    def warm_up(self, wrapper: Any, data: object, optim_wrapper: AnyOptimWrapper) -> None:
        """Run a backward pass, so that DDP orders its buckets before training resumes.

        After the first backward pass of a run DDP orders buckets by the time at which gradients
        became ready, and this order decides how the values of more than two ranks are added up.
        The batch is copied, buffers are restored, and there are no gradients before the first
        iteration; the caller restores the random states.
        """
        if torch_dist.get_world_size(self.setting.users_group) <= 2:
            return  # The sum of two values has no order.
        module = wrapper.module
        buffers = [
            (part, name, buffer, buffer.clone())
            for part in module.modules()
            for name, buffer in part.named_buffers(recurse=False)
        ]
        with optim_wrapper.optim_context(wrapper):
            wrapper.require_backward_grad_sync = True  # False while gradients accumulate
            data = module.data_preprocessor(copy.deepcopy(data), training=True)
            losses = wrapper._run_forward(data, mode='loss')
        module.parse_losses(losses)[0].backward()
        with torch.no_grad():
            for part, name, buffer, before in buffers:
                setattr(part, name, buffer.copy_(before))  # PyTorch 1.10's BatchNorm replaces it
        for parameter in module.parameters():
            parameter.grad = None

    def take_hook(self, hook: Tuple[object, Callable]) -> None:
        """See :meth:`Averaging.take_hook`."""
        self._hook_is_due = self._hook_is_ours = False
        self.users_hook = hook


class StagedAveraging(Averaging):
    """Gradients travel through host memory when backward has ended; see :mod:`.lazy_staging`."""

    sends_weights = True

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.tolerates_unused = True

    def init(self, wrapper: Any, module: nn.Module, **arguments: object) -> None:
        """Set the attributes of DDP that its ``no_sync`` and other code read.

        DDP's constructor sends the parameters through the backend and makes a reducer. Both fail
        where the backend does not take tensors of the device, but MMEngine and its users recognize
        wrapped models by ``isinstance(model, MMDistributedDataParallel)``.
        """
        device = self.setting.device
        nn.Module.__init__(wrapper)
        wrapper.module, wrapper.device, wrapper.device_type = module, device, device.type
        wrapper.device_ids = wrapper.output_device = None
        group = arguments['process_group']
        wrapper.process_group = torch_dist.group.WORLD if group is None else group
        wrapper.broadcast_buffers = arguments['broadcast_buffers']
        wrapper.find_unused_parameters = arguments['find_unused_parameters']
        wrapper.require_backward_grad_sync = wrapper.require_forward_param_sync = True
        wrapper._use_replicated_tensor_module = False  # asked by `train()` of PyTorch 1.13

    def start(self, wrapper: object, trained: TrainableSet) -> None:
        """See :meth:`Averaging.start`."""
        setting, size = self.setting, self.setting.options.bucket_cap_mb
        with trained.requiring_gradients():
            self.staging = self._host = LazyStaging(
                trained.named,
                setting.accelerator,
                setting.group,
                bucket_bytes=None if size is None else int(size * 2**20),
                compress=setting.compress,
                policy=setting.policy,
                before=self.staging,
            )

    def restart(self, wrapper: object, trained: TrainableSet) -> None:
        """See :meth:`Averaging.restart`."""
        broadcast_tensors(trained.new, self.setting.accelerator, self.setting.users_group)
        self.start(wrapper, trained)

    def forward(self, wrapper: Any, *inputs: object, **kwargs: object) -> object:
        """See :meth:`Averaging.forward`."""
        wrapper.send_buffers(wrapper.require_forward_param_sync)
        outputs = wrapper.module(*inputs, **kwargs)
        synchronize = torch.is_grad_enabled() and wrapper.require_backward_grad_sync
        wrapper.require_forward_param_sync = synchronize
        if torch.is_grad_enabled():
            self._host.prepare(outputs, synchronize)
        return outputs

    def average(self, trained: TrainableSet) -> None:
        """See :meth:`Averaging.average`."""
        self._host.average()

    def before_update(self, optim_wrapper: AnyOptimWrapper) -> None:
        """See :meth:`Averaging.before_update`."""
        from mmdevplug.optim.device_amp_optim_wrapper import set_overflow_source

        set_overflow_source(optim_wrapper, self.staging)

    def check_method(self, name: str) -> None:
        """See :meth:`Averaging.check_method`."""
        raise ModelError(
            f"{name}() needs PyTorch's DDP, but gradients on {self.setting.device} travel through "
            f'the host when backward has ended, as on every lazy device, and on others with '
            f'PyTorch 1. Remove the call, or use the native backend of the device.'
        )
