"""Wrap a model for data parallel training on any device."""

import copy
from functools import partial
from typing import Any, Callable, Dict, List, Optional, Tuple, Union

import torch
from mmengine.logging import print_log
from mmengine.model import MMDistributedDataParallel, detect_anomalous_params
from mmengine.optim import OptimWrapper
from mmengine.registry import MODEL_WRAPPERS
from torch import Tensor, distributed as torch_dist, nn

from mmdevplug.accelerators import devices_of, enter_rank_device
from mmdevplug.accelerators.backend import suits_native_ddp
from mmdevplug.accelerators.detection import AcceleratorConfig
from mmdevplug.distributed.coalesced import broadcast_tensors
from mmdevplug.distributed.nonfinite import FinitePolicy
from mmdevplug.distributed.waiting import wait_for_everyone
from mmdevplug.errors import ModelError
from mmdevplug.fault_tolerance.failure import fail_together
from mmdevplug.model.loss_path import check_loss
from mmdevplug.model.move import describe_misplaced, misplaced_tensors, move_module
from mmdevplug.model.norm_layers import convert_norm_layers
from mmdevplug.utils.annotations import AnyGroup, AnyOptimWrapper
from mmdevplug.utils.model import list_optim_wrappers
from mmdevplug.utils.torch_compat import is_at_least

from .ddp_hook import BucketAveraging
from .model_signature import check_same_model
from .own_step import average_gradients, averaging_updates, has_own_step
from .trainable_set import COMPARING, TrainableSet, check_optimizers
from .unused_parameters import naming_parameters, refuse_unreduced
from .wrapper_arguments import (
    check_compressible,
    check_module,
    ddp_arguments,
    read_options,
    suits_ddp,
)


@MODEL_WRAPPERS.register_module()
class DeviceDistributedDataParallel(MMDistributedDataParallel):
    """Train data parallel on the device of this rank.

    The module is moved to its device first. Then PyTorch's DDP averages the gradients, over the
    device's own backend or over the backend ``staged``. Those of a lazy device are averaged when
    backward has ended, with the same results. ``train_step``,
    ``val_step``, ``test_step``, ``module`` and the keys of ``state_dict`` are those of
    :class:`mmengine.model.MMDistributedDataParallel`.

    Args:
        module (nn.Module): The model, on any device.
        accelerator (str, dict or Accelerator, optional): Defaults to None: the one of this
            process, or else what detection finds.
        device_ids (list, optional): Accepted from runners and configs that pass it, and replaced
            by what the device takes.
        output_device (int or torch.device, optional): As ``device_ids``.
        broadcast_buffers (bool): Whether rank 0's buffers are sent to all ranks at the beginning
            of a forward pass. Defaults to True, as in PyTorch.
        find_unused_parameters (bool): Needed by PyTorch's DDP if parameters go unused; on
            lazy devices they are found without it. Defaults to False.
        process_group (ProcessGroup, optional): Defaults to None: all ranks.
        detect_anomalous_params (bool): See MMDistributedDataParallel. Defaults to False.
        **kwargs: Fields of :class:`mmdevplug.config.model_wrapper.WrapperOptions`
            (``bucket_cap_mb=None``, ``grad_compression='none'`` and ``nonfinite_grads=None``), and
            other arguments of PyTorch's DDP, which have no effect on lazy devices.

    Raises:
        ModelError: If the model is wrapped already, has nothing to train, or is not the same on
            all ranks, or if an option has an invalid value.
        LaunchError: If no process group exists.
        AcceleratorError: If the device cannot be used.
    """

    promises = dict(
        train_step='gradients are not averaged, and each rank trains a model of its own'
    )
    fulfilled_by = dict(train_step=('forward',))
    #: Averages gradients through host memory; None where PyTorch's DDP averages.
    staging: Any = None  # a LazyStaging
    #: Whether `train_step` has materialized the iteration; `DeviceHook` resets it.
    step_materialized = False
    _loss_checked = False
    #: The hook that the user registered, with its state.
    _users_hook: Optional[Tuple[object, Any]] = None

    def __init__(
        self,
        module: nn.Module,
        accelerator: AcceleratorConfig = None,
        device_ids: Optional[List] = None,
        output_device: Optional[Union[int, torch.device]] = None,
        broadcast_buffers: bool = True,
        find_unused_parameters: bool = False,
        process_group: AnyGroup = None,
        detect_anomalous_params: bool = False,
        **kwargs: object,
    ) -> None:
        check_module(module)
        own = read_options(DeviceDistributedDataParallel, kwargs)
        chosen, device = enter_rank_device(accelerator)
        group = torch_dist.group.WORLD if process_group is None else process_group
        on_host = device.type == 'cpu' or not suits_native_ddp(chosen, device, group)
        check_same_model(module, process_group)
        averaging_group = group
        if on_host:
            from mmdevplug.distributed.staged_groups import staged_counterpart

            averaging_group = staged_counterpart(group)
        lazy = chosen.compilation.lazy
        taken = chosen.gloo_takes_tensors or suits_ddp(find_unused_parameters)
        staged = on_host and (lazy or not taken)
        convert_norm_layers(module, chosen, device)
        compress = own.grad_compression == 'bf16'
        if compress:
            check_compressible(module)
        stops = on_host if own.nonfinite_grads is None else own.nonfinite_grads == 'stop'
        averaging: Dict[str, Any] = dict(
            compress=compress, policy=FinitePolicy(stops, process_group)
        )
        options = dict(
            broadcast_buffers=broadcast_buffers,
            find_unused_parameters=find_unused_parameters,
            process_group=averaging_group if is_at_least('2.0') else process_group,
        )
        if staged:
            averaging['group'] = averaging_group
            if own.bucket_cap_mb is not None:
                averaging['bucket_bytes'] = int(own.bucket_cap_mb * 2**20)
            # Before the move: on the host it takes no copy between devices.
            broadcast_tensors([*module.parameters(), *module.buffers()], chosen, process_group)
            self._init_without_reducer(move_module(module, device), device, **options)
        else:
            move_module(module, device)
            if own.bucket_cap_mb is not None:
                kwargs['bucket_cap_mb'] = own.bucket_cap_mb
            arguments = ddp_arguments(
                {**options, **kwargs}, chosen, module, device, on_host, on_host and not compress
            )
            super().__init__(module, **arguments)
            self._ddp_arguments = arguments
        self.accelerator = chosen
        self.policy = averaging['policy']
        self._averaging = averaging
        self._averaging_group = averaging_group
        # All ranks by None: a model is not to keep threads of their group until Python has ended.
        self._users_group = None if group is torch_dist.group.WORLD else group
        self._devices = devices_of(module.parameters())
        # After the move, which may have made new parameters.
        self._trainable = TrainableSet(module, staged or find_unused_parameters)
        if staged:
            self._start_staging()
        self._hook_is_due = self._hook_is_ours = not staged and (
            on_host or self.policy.active or compress
        )
        self.detect_anomalous_params = detect_anomalous_params
        if lazy:
            from mmdevplug.model.host.predictions import materialize_predictions

            materialize_predictions(module, chosen, self._devices)

    def _init_without_reducer(
        self,
        module: nn.Module,
        device: torch.device,
        process_group: AnyGroup,
        broadcast_buffers: bool,
        find_unused_parameters: bool,
    ) -> None:
        """Set the attributes of DDP that its ``no_sync`` and other code read.

        DDP's constructor sends the parameters through the backend and makes a reducer. Both fail
        where the backend does not take tensors of the device, but MMEngine and its users recognize
        wrapped models by ``isinstance(model, MMDistributedDataParallel)``.
        """
        nn.Module.__init__(self)
        self.module, self.device, self.device_type = module, device, device.type
        self.device_ids = self.output_device = None
        self.process_group = process_group if process_group is not None else torch_dist.group.WORLD
        self.broadcast_buffers = broadcast_buffers
        self.find_unused_parameters = find_unused_parameters
        self.require_backward_grad_sync = self.require_forward_param_sync = True

    def _start_staging(self) -> None:
        from .lazy_staging import LazyStaging

        with self._trainable.requiring_gradients():
            self.staging = LazyStaging(
                self._trainable.named, self.accelerator, before=self.staging, **self._averaging
            )

    def _restart_ddp(self) -> None:
        """Build PyTorch's DDP anew, for the parameters that the module has now."""
        if getattr(getattr(self, '_join_config', None), 'enable', False):
            raise ModelError(
                f'parameters of {type(self.module).__name__} began or ceased to be trained inside '
                f'join(), whose other ranks may have ended. Change them before or after it.'
            )
        # What nn.Module keeps of this wrapper, its mode and its hooks, and what others have set.
        names = 'detect_anomalous_params', 'require_backward_grad_sync'
        kept = {name: self.__dict__[name] for name in (*nn.Module().__dict__, *names)}
        # The hooks of a reducer go with it.
        self.reducer = self.logger = None
        buffers = [(buffer, buffer.clone()) for buffer in self._trainable.kept_buffers]
        with self._trainable.requiring_gradients():
            super().__init__(self.module, **self._ddp_arguments)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)  # DDP has sent those of rank 0
        self.__dict__.update(kept)
        self._hook_is_due = self._hook_is_ours
        if self._users_hook is not None:
            super().register_comm_hook(*self._users_hook)

    def _follow_trainable(self) -> None:
        """Average the gradients of what is trained now, on all ranks.

        Raises:
            ModelError: If the ranks train different parameters, or some are on another device.
            RankFailedError: If other ranks noticed no change.
        """
        group, before = self._users_group, self._trainable
        self._trainable = TrainableSet(self.module, before.tolerates_unused, before)
        print_log(
            f'Parameters of {type(self.module).__name__} began or ceased to be trained. Averaged '
            f'from here on: {self._trainable.describe_change(before)}.',
            'current',
        )
        if group is None:
            # Others may have noticed nothing, and must not take this for their next average.
            wait_for_everyone(COMPARING)
        check_same_model(self.module, group)
        elsewhere = misplaced_tensors(self.module, self.device) if len(self._devices) == 1 else {}
        if elsewhere:
            raise ModelError(
                f'{type(self.module).__name__} has changed, and has tensors that are not on '
                f'{self.device}: {describe_misplaced(elsewhere)}. Move a new module to the device '
                f'before its parameters are given to the optimizer.'
            )
        if self.staging is None:
            self._restart_ddp()
        else:
            broadcast_tensors(self._trainable.new, self.accelerator, group)
            self._start_staging()
        self._loss_checked = False

    def forward(self, *inputs: object, **kwargs: object) -> Any:
        """Call the module; see :meth:`torch.nn.parallel.DistributedDataParallel.forward`."""
        if torch.is_grad_enabled():
            if self.staging is None:
                refuse_unreduced(self)
            if self._trainable.has_changed():
                self._follow_trainable()
        if self.staging is None:
            if self._hook_is_due:
                self._hook_is_due = False  # DDP takes only one
                averaging = BucketAveraging(
                    self._trainable.named,
                    self._averaging_group,
                    waits_inside=getattr(self, 'static_graph', False),
                    **self._averaging,
                )
                super().register_comm_hook(None, averaging.hook)
            return super().forward(*inputs, **kwargs)
        if self.broadcast_buffers and self.require_forward_param_sync:
            with torch.no_grad():
                broadcast_tensors(list(self.module.buffers()), self.accelerator, self._users_group)
        outputs = self.module(*inputs, **kwargs)
        synchronize = torch.is_grad_enabled() and self.require_backward_grad_sync
        self.require_forward_param_sync = synchronize
        if torch.is_grad_enabled():
            self.staging.prepare(outputs, synchronize)
        return outputs

    def train_step(
        self, data: Union[dict, tuple, list], optim_wrapper: OptimWrapper
    ) -> Dict[str, Tensor]:
        """Run forward, backward and the parameters' update.

        On a lazy device the iteration is materialized twice: with host staging at the end of
        backward, and here. Returns tensors for the log.

        Raises:
            ModelError: If the loss depends on none of the model's parameters.
            RankFailedError: If another rank failed.
        """
        with fail_together('training'), naming_parameters(self):
            if has_own_step(self.module):
                return self._run_own_step(data, optim_wrapper)
            with optim_wrapper.optim_context(self):
                data = self.module.data_preprocessor(data, training=True)
                losses = self._run_forward(data, mode='loss')
            parsed_loss, log_vars = self.module.parse_losses(losses)
            if not self._loss_checked:
                check_loss(parsed_loss, self.module)
                self._loss_checked = True
            self.follow_scaler(optim_wrapper)
            if self.staging is not None:
                from mmdevplug.optim.device_amp_optim_wrapper import set_overflow_source

                set_overflow_source(optim_wrapper, self.staging)
            check_optimizers(self.module, [self._trainable], optim_wrapper)
            optim_wrapper.update_params(parsed_loss)
            if self.detect_anomalous_params:
                detect_anomalous_params(parsed_loss, model=self)
            self._materialize_step(optim_wrapper)
        return log_vars

    def _materialize_step(self, optim_wrapper: AnyOptimWrapper) -> None:
        self.accelerator.compilation.materialize_all(self._devices)
        self.step_materialized = True
        if self.accelerator.compilation.lazy:
            from mmdevplug.optim.device_optim_wrapper import log_norms

            log_norms(optim_wrapper)

    def _run_own_step(self, data: Any, optim_wrapper: AnyOptimWrapper) -> Dict[str, Tensor]:
        """Call the model's own ``train_step``, and average before each of its updates."""
        name = type(self.module).__name__
        if not self._loss_checked:
            self._loss_checked = True
            print_log(
                f'{name} has a train_step of its own, which is called: gradients are averaged '
                f'before each of its updates, when backward has ended.',
                'current',
            )
        if self._users_hook is not None:
            raise ModelError(
                f'register_comm_hook() has no effect for {name}, which has a train_step of its '
                f'own: DDP does not know its backward passes. Remove the call.'
            )
        if self._trainable.has_changed():
            self._follow_trainable()
        if self.broadcast_buffers:
            with torch.no_grad():
                broadcast_tensors(list(self.module.buffers()), self.accelerator, self._users_group)
        self.follow_scaler(optim_wrapper)
        check_optimizers(self.module, [self._trainable], optim_wrapper)
        with averaging_updates(optim_wrapper, partial(average_gradients, self), name):
            log_vars = self.module.train_step(data, optim_wrapper)
        self._materialize_step(optim_wrapper)
        return log_vars

    def follow_scaler(self, optim_wrapper: AnyOptimWrapper) -> None:
        """Leave NaN to a gradient scaler, if there is one, which skips the update."""
        scales = False
        for wrapper in list_optim_wrappers(optim_wrapper):
            scaler = getattr(wrapper, 'loss_scaler', None)
            scales = scales or (scaler is not None and scaler.is_enabled())
        self.policy.suspended, self.policy.active = scales, self.policy.stops and not scales

    def warm_up(self, data: Union[dict, tuple, list], optim_wrapper: OptimWrapper) -> None:
        """Run a backward pass, so that PyTorch's DDP orders its buckets before training resumes.

        After the first backward pass of a run DDP orders buckets by the time at which gradients
        became ready, and this order decides how the values of more than two ranks are added up. A
        resumed run has to add up its first gradients as the uninterrupted run did. The batch is
        copied, buffers are restored, and there are no gradients before the first iteration; the
        caller restores the random states.
        """
        small = torch_dist.get_world_size(self._users_group) <= 2
        if self.staging is not None or small or has_own_step(self.module):
            return  # Host staging needs no warm-up, and the sum of two values has no order.
        buffers = [
            (module, name, buffer, buffer.clone())
            for module in self.module.modules()
            for name, buffer in module.named_buffers(recurse=False)
        ]
        with optim_wrapper.optim_context(self):
            data = self.module.data_preprocessor(copy.deepcopy(data), training=True)
            losses = self._run_forward(data, mode='loss')
        self.module.parse_losses(losses)[0].backward()
        with torch.no_grad():
            for module, name, buffer, before in buffers:
                setattr(module, name, buffer.copy_(before))  # PyTorch 1.10's BatchNorm replaces it
        for parameter in self.module.parameters():
            parameter.grad = None

    def register_comm_hook(self, state: object, hook: Callable) -> None:
        """Register a communication hook with PyTorch's DDP, in place of ours.

        ``grad_compression`` and ``nonfinite_grads`` have no effect then.

        Raises:
            ModelError: Under host staging, which has no buckets on the device.
        """
        self._refuse_under_staging('register_comm_hook')
        super().register_comm_hook(state, hook)
        self._hook_is_due = self._hook_is_ours = False
        self._users_hook = state, hook

    def join(self, *args: object, **kwargs: object) -> Any:
        """Train with uneven inputs; see :meth:`torch.nn.parallel.DistributedDataParallel.join`.

        Raises:
            ModelError: Under host staging.
        """
        self._refuse_under_staging('join')
        return super().join(*args, **kwargs)

    def _refuse_under_staging(self, method: str) -> None:
        if self.staging is not None:
            raise ModelError(
                f"{method}() needs PyTorch's DDP, but gradients on {self.device} travel through "
                f'the host when backward has ended, as on every lazy device, and on others with '
                f'PyTorch 1. Remove the call, or use the native backend of the device.'
            )
