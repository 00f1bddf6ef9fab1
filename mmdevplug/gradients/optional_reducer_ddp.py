"""Wrap a module in DDP, with or without the reducer that averages gradients on the device."""

from typing import Any, Optional

import torch
from mmengine.model import MMDistributedDataParallel
from torch import distributed as torch_dist, nn

from mmdevplug.errors import ModelError


class OptionalReducerDDP(MMDistributedDataParallel):
    """Wrap a module as MMEngine's DDP, and leave out the reducer where it cannot work.

    DDP's constructor always sends the parameters through the backend and makes a reducer. Both
    fail where the backend does not take tensors of the device. But MMEngine and its users
    recognize a wrapped model by ``isinstance(model, MMDistributedDataParallel)``, so a wrapper
    that averages in another way has to inherit from it.

    Without a reducer, a subclass synchronizes the initial weights and overrides ``forward``.
    ``no_sync``, ``module`` and the keys of ``state_dict`` are those of DDP. Methods that need the
    reducer raise an error.

    Args:
        module (nn.Module): The model, on its device.
        reducer (bool): Whether to make DDP's reducer. Defaults to True.
        device (torch.device, optional): Device of this rank; only needed without a reducer.
            Defaults to None.
        **kwargs: Arguments of DDP. Without a reducer only ``process_group``,
            ``broadcast_buffers`` and ``find_unused_parameters``.
    """

    #: Whether DDP's reducer averages the gradients.
    has_reducer = True

    def __init__(
        self,
        module: nn.Module,
        reducer: bool = True,
        device: Optional[torch.device] = None,
        **kwargs: Any,
    ) -> None:
        if reducer:
            super().__init__(module, **kwargs)
        else:
            self._init_without_reducer(module, device, **kwargs)

    def _init_without_reducer(
        self,
        module: nn.Module,
        device: torch.device,
        process_group: Any = None,
        broadcast_buffers: bool = True,
        find_unused_parameters: bool = False,
    ) -> None:
        """Set the attributes of DDP that its ``no_sync`` and other code read."""
        nn.Module.__init__(self)
        self.has_reducer = False
        self.module = module
        self.device = device
        self.device_type = device.type
        self.device_ids = self.output_device = None
        self.process_group = process_group if process_group is not None else torch_dist.group.WORLD
        self.broadcast_buffers = broadcast_buffers
        self.find_unused_parameters = find_unused_parameters
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True

    def register_comm_hook(self, state: object, hook: Any) -> None:
        """Register a communication hook with the reducer.

        Raises:
            ModelError: Without a reducer, which would call the hook.
        """
        self._check_reducer('register_comm_hook')
        super().register_comm_hook(state, hook)

    def join(self, *args: Any, **kwargs: Any) -> Any:
        """Train with uneven inputs; see :meth:`torch.nn.parallel.DistributedDataParallel.join`.

        Raises:
            ModelError: Without a reducer.
        """
        self._check_reducer('join')
        return super().join(*args, **kwargs)

    def _check_reducer(self, method: str) -> None:
        if not self.has_reducer:
            raise ModelError(
                f"{method}() needs PyTorch's DDP, but gradients on {self.device} travel through "
                f'the host, because backend {torch_dist.get_backend(self.process_group)!r} does '
                f'not take {self.device_type} tensors. Remove the call, or use the native '
                f'backend of the device.'
            )
