"""Wrap a model for data parallel training on any device."""

from functools import partial
from typing import Callable, Dict, List, Optional, Union

import torch
from mmengine.logging import print_log
from mmengine.model import MMDistributedDataParallel, detect_anomalous_params
from mmengine.optim import OptimWrapper
from mmengine.registry import MODEL_WRAPPERS
from torch import Tensor, nn

from mmdevplug.accelerators import devices_of, enter_rank_device
from mmdevplug.accelerators.detection import AcceleratorConfig
from mmdevplug.distributed.coalesced import broadcast_tensors
from mmdevplug.distributed.waiting import wait_for_everyone
from mmdevplug.errors import ModelError
from mmdevplug.fault_tolerance.failure import fail_together
from mmdevplug.model.loss_path import check_loss
from mmdevplug.model.move import describe_misplaced, misplaced_tensors
from mmdevplug.model.passes import Preparation, prepare
from mmdevplug.optim.device_optim_wrapper import log_norms
from mmdevplug.utils.annotations import AnyGroup, AnyOptimWrapper
from mmdevplug.utils.model import list_optim_wrappers
from mmdevplug.utils.torch_compat import is_at_least

from .averaging import choose_averaging
from .lazy_staging import LazyStaging
from .model_signature import check_same_model
from .own_step import averaging_updates, compare_parameters, has_own_step
from .trainable_set import COMPARING, TrainableSet, check_optimizers
from .unused_parameters import naming_parameters
from .wrapper_arguments import check_compressible, check_module, read_options


@MODEL_WRAPPERS.register_module()
class DeviceDistributedDataParallel(MMDistributedDataParallel):
    """Train data parallel on the device of this rank.

    The module is prepared and moved to its device first, see :mod:`mmdevplug.model.passes`. Then
    PyTorch's DDP averages the gradients, over the device's own backend or over the backend
    ``staged``. Those of a lazy device are averaged when backward has ended, with the same results.
    ``train_step``, ``val_step``, ``test_step``, ``module`` and the keys of ``state_dict`` are
    those of :class:`mmengine.model.MMDistributedDataParallel`.

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
    #: Whether `train_step` has materialized the iteration; `LazyHook` resets it.
    step_materialized = False
    _loss_checked = False
    #: How often the model's own `train_step` was called, and whether ranks are still compared.
    _own_steps, _compares = 0, True

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
        check_same_model(module, process_group)
        averaging = choose_averaging(chosen, device, process_group, own, find_unused_parameters)
        setting = averaging.setting
        if setting.compress:
            check_compressible(module)
        sends, group = averaging.sends_weights, setting.users_group
        module = prepare(module, Preparation(chosen, device, sends=sends, group=group))
        averaging.init(
            self,
            module,
            broadcast_buffers=broadcast_buffers,
            find_unused_parameters=find_unused_parameters,
            process_group=setting.group if is_at_least('2.0') else process_group,
            **kwargs,
        )
        self.accelerator, self.averaging, self.policy = chosen, averaging, setting.policy
        self._devices = devices_of(module.parameters())
        # After the move, which may have made new parameters.
        self._trainable = TrainableSet(module, averaging.tolerates_unused)
        averaging.start(self, self._trainable)
        self.detect_anomalous_params = detect_anomalous_params

    @property
    def staging(self) -> Optional[LazyStaging]:
        """Averages gradients through host memory; None where PyTorch's DDP averages."""
        return self.averaging.staging

    def send_buffers(self, due: bool = True) -> None:
        """Send rank 0's buffers to all ranks, if that was asked for."""
        if self.broadcast_buffers and due:
            group = self.averaging.setting.users_group
            with torch.no_grad():
                broadcast_tensors(list(self.module.buffers()), self.accelerator, group)

    def _sync_params_and_buffers(self, authoritative_rank: int = 0) -> None:
        """Send the weights of a rank, for the constructor of DDP in PyTorch 1.10.

        There DDP sends what ``state_dict()`` returns: extra states are no tensors, and a method of
        one's own may leave weights out.
        """
        named = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        sent = [
            value.detach()
            for name, value in named.items()
            if name not in self.parameters_to_ignore
        ]
        if sent:
            self._distributed_broadcast_coalesced(
                sent, self.broadcast_bucket_size, authoritative_rank
            )

    def _follow_trainable(self) -> None:
        """Average the gradients of what is trained now, on all ranks.

        Raises:
            ModelError: If the ranks train different parameters, or some are on another device.
            RankFailedError: If other ranks noticed no change.
        """
        group, before = self.averaging.setting.users_group, self._trainable
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
        self.averaging.restart(self, self._trainable)
        self._loss_checked = False

    def forward(self, *inputs: object, **kwargs: object) -> object:
        """Call the module; see :meth:`torch.nn.parallel.DistributedDataParallel.forward`."""
        if torch.is_grad_enabled():
            self.averaging.before_forward(self)
            if self._trainable.has_changed():
                self._follow_trainable()
        return self.averaging.forward(self, *inputs, **kwargs)

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
            self.averaging.before_update(optim_wrapper)
            check_optimizers(self.module, [self._trainable], optim_wrapper)
            optim_wrapper.update_params(parsed_loss)
            if self.detect_anomalous_params:
                detect_anomalous_params(parsed_loss, model=self)
            self._materialize_step(optim_wrapper)
        return log_vars

    def _materialize_step(self, optim_wrapper: AnyOptimWrapper) -> None:
        self.accelerator.compilation.materialize_all(self._devices)
        self.step_materialized = True
        log_norms(optim_wrapper)

    def _run_own_step(self, data: object, optim_wrapper: AnyOptimWrapper) -> Dict[str, Tensor]:
        """Call the model's own ``train_step``, and average before each of its updates."""
        name = type(self.module).__name__
        if not self._loss_checked:
            self._loss_checked = True
            print_log(
                f'{name} has a train_step of its own, which is called: gradients are averaged '
                f'before each of its updates, when backward has ended.',
                'current',
            )
        if self.averaging.users_hook is not None:
            raise ModelError(
                f'register_comm_hook() has no effect for {name}, which has a train_step of its '
                f'own: DDP does not know its backward passes. Remove the call.'
            )
        if self._trainable.has_changed():
            self._follow_trainable()
        self.send_buffers()
        self.follow_scaler(optim_wrapper)
        check_optimizers(self.module, [self._trainable], optim_wrapper)
        with averaging_updates(
            optim_wrapper, partial(self.averaging.average, self._trainable), name
        ):
            log_vars = self.module.train_step(data, optim_wrapper)
        self._materialize_step(optim_wrapper)
        self._own_steps += 1
        # After 1, 2, 4, 8 ... steps: what a model updates may change with time.
        if self._compares and not self._own_steps & (self._own_steps - 1):
            group = self.averaging.setting.users_group
            self._compares = compare_parameters(
                self._trainable.named, self.accelerator, group, name
            )
        return log_vars

    def follow_scaler(self, optim_wrapper: AnyOptimWrapper) -> None:
        """Leave NaN to a gradient scaler, if there is one, which skips the update."""
        scales = False
        for wrapper in list_optim_wrappers(optim_wrapper):
            scaler = getattr(wrapper, 'loss_scaler', None)
            scales = scales or (scaler is not None and scaler.is_enabled())
        self.policy.suspended, self.policy.active = scales, self.policy.stops and not scales

    def warm_up(self, data: Union[dict, tuple, list], optim_wrapper: OptimWrapper) -> None:
        """Do what decides the order of sums, before a resumed training adds up its first.

        The batch is copied, buffers are restored, and there are no gradients before the first
        iteration; the caller restores the random states.
        """
        if not has_own_step(self.module):
            self.averaging.warm_up(self, data, optim_wrapper)

    def register_comm_hook(self, state: object, hook: Callable) -> None:
        """Register a communication hook with PyTorch's DDP, in place of ours.

        ``grad_compression`` and ``nonfinite_grads`` have no effect then.

        Raises:
            ModelError: Under host staging, which has no buckets on the device.
        """
        self.averaging.check_method('register_comm_hook')
        super().register_comm_hook(state, hook)
        self.averaging.take_hook((state, hook))

    def join(self, *args: object, **kwargs: object) -> object:
        """Train with uneven inputs; see :meth:`torch.nn.parallel.DistributedDataParallel.join`.

        Raises:
            ModelError: Under host staging.
        """
        self.averaging.check_method('join')
        return super().join(*args, **kwargs)
