"""The optimizer wrapper for lazy devices."""

from typing import Any, Tuple

from mmengine.optim import OptimWrapper
from mmengine.registry import OPTIM_WRAPPERS
from torch import Tensor

from mmdevplug.distributed.process_group import rank_device, rank_devices
from mmdevplug.utils.model import list_optim_wrappers

from .clipping import clip_grad_norm_by_device


@OPTIM_WRAPPERS.register_module()
class DeviceOptimWrapper(OptimWrapper):
    """MMEngine's optimizer wrapper, in which clipping costs a lazy device no execution.

    MMEngine reads the norm of the gradients for the log as soon as it is recorded, which runs a
    graph for this one number. Here it stays on the device until the iteration is materialized,
    and enters the log then, in time for the hooks that write it. On an eager device, and where
    nobody calls :meth:`log_norms`, everything is as in MMEngine.

    Args:
        *args: See :class:`mmengine.optim.OptimWrapper`.
        **kwargs: See :class:`mmengine.optim.OptimWrapper`. ``error_if_nonfinite`` of
            ``clip_grad`` asks for the norm at once and so brings the execution back.
    """

    _logs_later = False
    #: The norms that are still on the device.
    _norms: Tuple[Tensor, ...] = ()

    def _clip_grad(self) -> None:
        several = len(rank_devices()) > 1
        if not rank_device()[0].lazy or not (several or self._logs_later):
            super()._clip_grad()
            return
        parameters = [
            parameter
            for group in self.optimizer.param_groups
            for parameter in group['params']
            if parameter.requires_grad and parameter.grad is not None
        ]
        if not parameters:
            return
        # torch_xla has a function of its own, which mixes the norms of several devices.
        by_device = several and self.grad_name == 'grad_norm'
        clip = clip_grad_norm_by_device if by_device else self.clip_func
        norm = clip(parameters, **self.clip_grad_kwargs)
        if norm is None:
            return  # clipping by value has none
        self._norms = (*self._norms, norm)
        if not self._logs_later:
            self._log_norms()

    def log_norms(self) -> None:
        """Give the norms of clipped gradients to the message hub.

        To be called after an iteration was materialized, when reading them costs no execution.
        The first call is taken as a promise of more: from then on norms wait for it.
        """
        self._logs_later = True
        self._log_norms()

    def _log_norms(self) -> None:
        norms, self._norms = self._norms, ()
        if norms:
            accelerator, _ = rank_device()
            for norm in accelerator.to_host(norms):
                self.message_hub.update_scalar(f'train/{self.grad_name}', float(norm))


def log_norms(optim_wrapper: Any) -> None:
    """Call :meth:`DeviceOptimWrapper.log_norms` wherever there is one.

    Args:
        optim_wrapper (OptimWrapper or OptimWrapperDict): Wrappers of any kind.
    """
    for wrapper in list_optim_wrappers(optim_wrapper):
        if isinstance(wrapper, DeviceOptimWrapper):
            wrapper.log_norms()
