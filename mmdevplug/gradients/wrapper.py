"""Wrap a model for data parallel training on any device."""

import copy
import inspect
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

import torch
from mmengine.model import (
    MMDistributedDataParallel,
    detect_anomalous_params,
    is_model_wrapper,
)
from mmengine.optim import OptimWrapper
from mmengine.registry import MODEL_WRAPPERS
from torch import Tensor, distributed as torch_dist, nn
from torch.nn.parallel import DistributedDataParallel

from mmdevplug.accelerators import Accelerator, devices_of
from mmdevplug.accelerators.backend import backend_of
from mmdevplug.accelerators.detection import AcceleratorConfig
from mmdevplug.accelerators.lazy_predictions import materialize_predictions
from mmdevplug.config.fields import did_you_mean
from mmdevplug.config.model_wrapper import WrapperOptions
from mmdevplug.distributed.coalesced import broadcast_tensors
from mmdevplug.distributed.rank_device import rank_device
from mmdevplug.distributed.traffic import TRAFFIC, all_reduce_bytes, waiting
from mmdevplug.errors import LaunchError, ModelError
from mmdevplug.fault_tolerance.failure import fail_together
from mmdevplug.model.deferred_norm import resolving
from mmdevplug.model.loss_check import check_loss
from mmdevplug.model.move import check_materialized, move_module
from mmdevplug.model.norm_layers import convert_norm_layers
from mmdevplug.optim import log_norms, trust_averages
from mmdevplug.utils.model import list_optim_wrappers

from .compression import make_compression
from .ddp_hook import BucketAveraging
from .host_staging import HostStaging
from .lazy_staging import LazyStaging
from .model_signature import check_same_model
from .nonfinite import FinitePolicy
from .overlapped_staging import OverlappedStaging
from .shared_buckets import SharedBucketAveraging, cpu_defaults
from .unused_parameters import refuse_unreduced


@MODEL_WRAPPERS.register_module()
class DeviceDistributedDataParallel(MMDistributedDataParallel):
    """Train data parallel on the device of this rank.

    The module is moved to its device first. Then PyTorch's DDP averages the gradients where the
    backend takes the device's tensors (CPU, CUDA, a vendor's own backend). Elsewhere they are
    averaged through host memory, with the same results. ``train_step``,
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
        find_unused_parameters (bool): Needed by PyTorch's DDP if parameters go unused; host
            staging finds them by itself. Defaults to False.
        process_group (ProcessGroup, optional): Defaults to None: all ranks.
        detect_anomalous_params (bool): See MMDistributedDataParallel. Defaults to False.
        **kwargs: Fields of :class:`mmdevplug.config.model_wrapper.WrapperOptions`
            (``bucket_cap_mb=None``, ``grad_compression='none'``, ``hierarchy='auto'`` and
            ``nonfinite_grads=None``), and other arguments of PyTorch's DDP, which have no effect
            on host staging.

    Raises:
        ModelError: If the model is wrapped already, has nothing to train, or is not the same on
            all ranks, or if an option has an invalid value.
        LaunchError: If no process group exists.
        AcceleratorError: If the device cannot be used.
    """

    #: Averages gradients through host memory; None where PyTorch's DDP averages.
    staging: Optional[HostStaging] = None
    #: Whether `train_step` has materialized the iteration; `DeviceHook` resets it.
    step_materialized = False

    def __init__(
        self,
        module: nn.Module,
        accelerator: AcceleratorConfig = None,
        device_ids: Optional[List] = None,
        output_device: Optional[Union[int, torch.device]] = None,
        broadcast_buffers: bool = True,
        find_unused_parameters: bool = False,
        process_group: Any = None,
        detect_anomalous_params: bool = False,
        **kwargs: Any,
    ) -> None:
        _check_module(module)
        own = _read_options(kwargs)
        chosen, device = rank_device(accelerator)
        takes_tensors = chosen.takes_tensors(backend_of(process_group))
        check_same_model(module, process_group)
        convert_norm_layers(module, chosen, device)
        options = dict(
            broadcast_buffers=broadcast_buffers,
            find_unused_parameters=find_unused_parameters,
            process_group=process_group,
        )
        through_host = device.type == 'cpu' or not takes_tensors
        averaging = dict(
            compression=make_compression(own.grad_compression, _trainable(module)),
            policy=FinitePolicy(
                own.nonfinite_grads or ('stop' if through_host else 'ignore'), process_group
            ),
        )
        if takes_tensors:
            move_module(module, device)
            if chosen.name == 'cpu':
                shares = own.hierarchy and averaging['compression'] is None
                kwargs = {**cpu_defaults(_trainable(module), bool(shares)), **kwargs}
            if own.bucket_cap_mb is not None:
                kwargs['bucket_cap_mb'] = own.bucket_cap_mb
            options = _rename_buffer_option(options, chosen, module)
            on_several = len(devices_of(module.parameters())) > 1  # DDP then takes no device ids
            device_ids = None if on_several else chosen.ddp_device_ids(device)
            super().__init__(module, device_ids=device_ids, **options, **kwargs)
        else:
            averaging['hierarchy'] = own.hierarchy
            if own.bucket_cap_mb is not None:
                averaging['bucket_bytes'] = int(own.bucket_cap_mb * 2**20)
            # Before the move: on the host it takes no copy between devices.
            broadcast_tensors([*module.parameters(), *module.buffers()], chosen, process_group)
            self._init_without_reducer(move_module(module, device), device, **options)
        self.accelerator = chosen
        self.policy = averaging['policy']
        self._averaging = averaging
        self._hierarchy = own.hierarchy
        self._ddp_averaging: Optional[BucketAveraging] = None
        self._devices = devices_of(module.parameters())
        if not takes_tensors:
            self.restart_staging()  # After the move, which may have made new parameters.
        self._hook_is_due = takes_tensors and (
            through_host or self.policy.active or averaging['compression'] is not None
        )
        self._hooked = False
        self.detect_anomalous_params = detect_anomalous_params
        self._loss_checked = False
        if chosen.lazy:
            materialize_predictions(module, chosen, self._devices)

    def _init_without_reducer(
        self,
        module: nn.Module,
        device: torch.device,
        process_group: Any,
        broadcast_buffers: bool,
        find_unused_parameters: bool,
    ) -> None:
        """Set the attributes of DDP that its ``no_sync`` and other code read.

        DDP's constructor sends the parameters through the backend and makes a reducer. Both fail
        where the backend does not take tensors of the device, but MMEngine and its users recognize
        wrapped models by ``isinstance(model, MMDistributedDataParallel)``.
        """
        nn.Module.__init__(self)
        self.module = module
        self.device = device
        self.device_type = device.type
        self.device_ids = self.output_device = None
        self.process_group = process_group if process_group is not None else torch_dist.group.WORLD
        self.broadcast_buffers = broadcast_buffers
        self.find_unused_parameters = find_unused_parameters
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True

    def restart_staging(self) -> None:
        """Average the gradients of the parameters that the module has now."""
        named = _trainable(self.module)
        on_several = len(devices_of([parameter for _, parameter in named])) > 1
        kind = LazyStaging if self.accelerator.lazy or on_several else OverlappedStaging
        self.staging = kind(named, self.accelerator, self.process_group, **self._averaging)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module; see :meth:`torch.nn.parallel.DistributedDataParallel.forward`."""
        if self.staging is None:
            if torch.is_grad_enabled():
                refuse_unreduced(self)
            if self._hook_is_due:
                self._ddp_averaging = self._choose_averaging()
                self.register_comm_hook(None, self._ddp_averaging.hook)
            if not self._hooked and torch.is_grad_enabled() and self.require_backward_grad_sync:
                # The backend does not report how long the buckets of DDP take.
                size = sum(p.numel() * p.element_size() for _, p in _trainable(self.module))
                world_size = torch_dist.get_world_size(self.process_group)
                TRAFFIC.record('gradients', sent=all_reduce_bytes(size, world_size))
            return super().forward(*inputs, **kwargs)
        if self.broadcast_buffers and self.require_forward_param_sync:
            with torch.no_grad():
                broadcast_tensors(
                    list(self.module.buffers()), self.accelerator, self.process_group
                )
        with resolving():
            outputs = self.module(*inputs, **kwargs)
        synchronize = torch.is_grad_enabled() and self.require_backward_grad_sync
        self.require_forward_param_sync = synchronize
        if torch.is_grad_enabled():
            self.staging.prepare(outputs, synchronize)
        return outputs

    def _build_params_for_reducer(self) -> Any:
        """Keep the names of the parameters that PyTorch's DDP knows by their numbers."""
        names = [name for name, _ in _trainable(self.module)]
        self.averaged_names = [name for name in names if name not in self.parameters_to_ignore]
        return super()._build_params_for_reducer()

    def _choose_averaging(self) -> BucketAveraging:
        """Average what DDP hands over in shared memory where ranks share it, or by messages."""
        named, averaging = _trainable(self.module), self._averaging
        # DDP waits inside the hook in the first iteration of a graph that it takes for static.
        may_share = self._hierarchy and not getattr(self, 'static_graph', False)
        if self.device_type == 'cpu' and averaging['compression'] is None and may_share:
            shared = SharedBucketAveraging.where_shared(
                named, self.process_group, averaging['policy'], self._hierarchy
            )
            if shared is not None:
                return shared
        return BucketAveraging(named, self.process_group, **averaging)

    def _sync_buffers(self) -> None:
        """Count how long PyTorch's DDP waits for rank 0, which sends its buffers."""
        with waiting('broadcasts', through_host=self.device_type == 'cpu'):
            super()._sync_buffers()

    def _sync_params(self) -> None:
        """See :meth:`_sync_buffers`, which PyTorch 1.10 calls so."""
        with waiting('broadcasts', through_host=self.device_type == 'cpu'):
            super()._sync_params()

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
        with fail_together('training'):
            with optim_wrapper.optim_context(self):
                data = self.module.data_preprocessor(data, training=True)
                losses = self._run_forward(data, mode='loss')
            parsed_loss, log_vars = self.module.parse_losses(losses)
            if not self._loss_checked:
                check_loss(parsed_loss, self.module)
                self._loss_checked = True
            self.policy.suspended = has_scaler(optim_wrapper)
            trust_averages(optim_wrapper, self.staging)
            optim_wrapper.update_params(parsed_loss)
            if self.detect_anomalous_params:
                detect_anomalous_params(parsed_loss, model=self)
            self.accelerator.materialize_all(self._devices)
            self.step_materialized = True
            log_norms(optim_wrapper)
        return log_vars

    def warm_up(self, data: Union[dict, tuple, list], optim_wrapper: OptimWrapper) -> None:
        """Run a backward pass, so that PyTorch's DDP orders its buckets before training resumes.

        After the first backward pass of a run DDP orders buckets by the time at which gradients
        became ready, and this order decides how the values of more than two ranks are added up. A
        resumed run has to add up its first gradients as the uninterrupted run did. The batch is
        copied, gradients and buffers are restored; the caller restores the random states.
        """
        if self.staging is not None or torch_dist.get_world_size(self.process_group) <= 2:
            return  # Host staging needs no warm-up, and the sum of two values has no order.
        buffers = [
            (module, name, buffer, buffer.clone())
            for module in self.module.modules()
            for name, buffer in module.named_buffers(recurse=False)
        ]
        gradients = [(parameter, parameter.grad) for parameter in self.module.parameters()]
        for parameter, _ in gradients:
            parameter.grad = None
        with optim_wrapper.optim_context(self):
            data = self.module.data_preprocessor(copy.deepcopy(data), training=True)
            losses = self._run_forward(data, mode='loss')
        self.module.parse_losses(losses)[0].backward()
        with torch.no_grad():
            for module, name, buffer, before in buffers:
                setattr(module, name, buffer.copy_(before))  # PyTorch 1.10's BatchNorm replaces it
        for parameter, gradient in gradients:
            parameter.grad = gradient

    def register_comm_hook(self, state: object, hook: Any) -> None:
        """Register a communication hook with PyTorch's DDP, in place of ours.

        ``grad_compression`` and ``nonfinite_grads`` have no effect then.

        Raises:
            ModelError: Under host staging, which has no buckets on the device.
        """
        self._refuse_under_staging('register_comm_hook')
        super().register_comm_hook(state, hook)
        self._hook_is_due = False  # DDP takes only one.
        self._hooked = True

    def join(self, *args: Any, **kwargs: Any) -> Any:
        """Train with uneven inputs; see :meth:`torch.nn.parallel.DistributedDataParallel.join`.

        Raises:
            ModelError: Under host staging.
        """
        self._refuse_under_staging('join')
        # Ranks that have joined answer messages alone.
        self._hierarchy = False
        if isinstance(self._ddp_averaging, SharedBucketAveraging):
            self._ddp_averaging.active = False
        return super().join(*args, **kwargs)

    def _refuse_under_staging(self, method: str) -> None:
        if self.staging is not None:
            raise ModelError(
                f"{method}() needs PyTorch's DDP, but gradients on {self.device} travel through "
                f'the host, because backend {torch_dist.get_backend(self.process_group)!r} does '
                f'not take {self.device_type} tensors. Remove the call, or use the native '
                f'backend of the device.'
            )


def has_scaler(optim_wrapper: Any) -> bool:
    """Return whether a gradient scaler skips the updates that overflow."""
    wrappers = list_optim_wrappers(optim_wrapper)
    scalers = [getattr(wrapper, 'loss_scaler', None) for wrapper in wrappers]
    return any(scaler is not None and scaler.is_enabled() for scaler in scalers)


def _check_module(module: nn.Module) -> None:
    if not isinstance(module, nn.Module):
        raise ModelError(
            f'the model is {module!r} of type {type(module).__name__}; expected an nn.Module, '
            f'whose parameters can be averaged. Pass the module itself, or an nn.Module that '
            f'calls the function.'
        )
    check_materialized(module)
    if is_model_wrapper(module):
        raise ModelError(
            f'the model is wrapped already, in {type(module).__name__}; expected the bare model. '
            f'Pass model.module, or remove the model_wrapper_cfg that wraps it a second time.'
        )
    if not _trainable(module):
        total = sum(1 for _ in module.parameters())
        raise ModelError(
            f'{type(module).__name__} has no parameter that requires a gradient ({total} '
            f'parameters, all frozen); expected at least one. Unfreeze part of the model '
            f'(frozen_stages, requires_grad), or run it without a launcher.'
        )


def _read_options(kwargs: Dict[str, Any]) -> WrapperOptions:
    """Take our options out of ``kwargs``, which then holds what PyTorch's DDP takes."""
    names = WrapperOptions.names()
    given = {name: kwargs.pop(name) for name in names if name in kwargs}
    torchs = inspect.signature(DistributedDataParallel.__init__).parameters
    unknown = sorted(set(kwargs) - set(torchs))
    if unknown:
        ours = inspect.signature(DeviceDistributedDataParallel.__init__).parameters
        raise TypeError(
            f'model_wrapper_cfg has {", ".join(unknown)}, which neither '
            f'DeviceDistributedDataParallel nor the DistributedDataParallel of torch '
            f'{torch.__version__} takes{did_you_mean(unknown, [*names, *torchs, *ours])} Correct '
            f'the name or remove it.'
        )
    options = WrapperOptions.from_dict(given)
    if not (torch_dist.is_available() and torch_dist.is_initialized()):
        raise LaunchError(
            'DeviceDistributedDataParallel needs a process group and there is none. Use '
            "runner_type='DeviceRunner' with --launcher pytorch, or call "
            'mmdevplug.init_device(launcher=...) before the model is wrapped.'
        )
    return options


def _rename_buffer_option(
    options: Dict[str, Any], accelerator: Accelerator, module: nn.Module
) -> Dict[str, Any]:
    """Let DDP send buffers once at the start, whether or not it sends them at each forward."""
    options = dict(options)
    if 'forward_sync_buffers' in inspect.signature(DistributedDataParallel.__init__).parameters:
        options['forward_sync_buffers'] = options.pop('broadcast_buffers')
    elif not options['broadcast_buffers']:
        # Without this, older releases leave the buffers of each rank as they are.
        broadcast_tensors(list(module.buffers()), accelerator, options['process_group'])
    return options


def _trainable(module: nn.Module) -> Sequence[Tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in module.named_parameters() if p.requires_grad]
