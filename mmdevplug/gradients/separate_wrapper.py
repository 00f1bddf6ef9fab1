"""Wrap each part of a model separately for data parallel training, e.g. of a GAN."""

from contextlib import ExitStack, contextmanager
from typing import Any, Dict, Iterator, List, Optional, Union

from mmengine.logging import print_log
from mmengine.model import MMSeparateDistributedDataParallel
from mmengine.optim import OptimWrapperDict
from mmengine.registry import MODEL_WRAPPERS
from torch import Tensor, nn

from mmdevplug.accelerators import devices_of, enter_rank_device
from mmdevplug.accelerators.detection import AcceleratorConfig
from mmdevplug.distributed.waiting import wait_for_everyone
from mmdevplug.errors import ModelError
from mmdevplug.fault_tolerance.failure import fail_together
from mmdevplug.lazy.predictions import training_step
from mmdevplug.model.move import move_module
from mmdevplug.optim.device_optim_wrapper import log_norms
from mmdevplug.utils.annotations import AnyOptimWrapper

from .lazy_staging import LazyStaging
from .model_signature import check_same_model
from .trainable_set import COMPARING, check_optimizers
from .unused_parameters import naming_parameters
from .wrapper import DeviceDistributedDataParallel


class _Part(DeviceDistributedDataParallel):
    """Average the gradients of a part, unless all its parameters are frozen."""

    def forward(self, *inputs: object, **kwargs: object) -> object:
        if _is_trainable(self.module):
            return super().forward(*inputs, **kwargs)
        # E.g. the discriminator while the generator learns: there is no gradient to average.
        return self.module(*inputs, **kwargs)


@MODEL_WRAPPERS.register_module()
class DeviceSeparateDistributedDataParallel(MMSeparateDistributedDataParallel):
    """Wrap each child with trainable parameters in :class:`DeviceDistributedDataParallel`.

    The model's own ``train_step`` runs, and calls its children, as with
    :class:`mmengine.model.MMSeparateDistributedDataParallel`.

    Args:
        module (nn.Module): The model, on any device, e.g. with the children ``generator`` and
            ``discriminator``.
        broadcast_buffers (bool): See DeviceDistributedDataParallel. Defaults to False.
        find_unused_parameters (bool): See DeviceDistributedDataParallel. Defaults to False.
        accelerator (str, dict or Accelerator, optional): Defaults to None: the one of this
            process, or else what detection finds.
        **kwargs: Other arguments of DeviceDistributedDataParallel, for each child.

    Raises:
        ModelError: If the model has trainable parameters of its own, or no child to train.
        LaunchError: If no process group exists.
        AcceleratorError: If the device cannot be used.
    """

    def __init__(
        self,
        module: nn.Module,
        broadcast_buffers: bool = False,
        find_unused_parameters: bool = False,
        accelerator: AcceleratorConfig = None,
        **kwargs: object,
    ) -> None:
        # As MMEngine does, instead of the constructor of DDP.
        nn.Module.__init__(self)
        _check_children(module)
        self.accelerator, self.device = enter_rank_device(accelerator)
        # As a whole, so that children keep sharing parameters.
        self.module = move_module(module, self.device)
        self._devices = devices_of(module.parameters())
        self._part_options: Dict[str, Any] = dict(
            kwargs,
            accelerator=self.accelerator,
            broadcast_buffers=broadcast_buffers,
            find_unused_parameters=find_unused_parameters,
        )
        self._wrap(self._unwrapped())

    def _unwrapped(self) -> List[str]:
        """Name the children that have parameters to train and are not wrapped."""
        return [
            name
            for name, child in self.module.named_children()
            if not isinstance(child, _Part) and _is_trainable(child)
        ]

    def _wrap(self, names: List[str]) -> None:
        for name in names:
            child: Any = self.module._modules[name]
            self.module._modules[name] = _Part(child, **self._part_options)

    def _follow_trainable(self) -> None:
        """Wrap children that were frozen and are trained now, or have been replaced."""
        _check_own_parameters(self.module)
        names = self._unwrapped()
        if names:
            print_log(f'Averaged from here on: gradients of {", ".join(names)}.', 'current')
            wait_for_everyone(COMPARING)
            check_same_model(self.module)
            self._wrap(names)

    @property
    def parts(self) -> List[DeviceDistributedDataParallel]:
        """Return the wrapped children."""
        return [part for part in self.module.children() if isinstance(part, _Part)]

    @property
    def staging(self) -> Optional[List[LazyStaging]]:
        """Return the host staging of each part; None where PyTorch's DDP averages."""
        return [part.staging for part in self.parts if part.staging is not None] or None

    def train_step(
        self, data: Union[dict, tuple, list], optim_wrapper: OptimWrapperDict
    ) -> Dict[str, Tensor]:
        """Call the model's own ``train_step``, and materialize on a lazy device.

        Raises:
            RankFailedError: If another rank failed.
        """
        with fail_together('training'), training_step(), naming_parameters(self):
            self._follow_trainable()
            check_optimizers(self.module, [part._trainable for part in self.parts], optim_wrapper)
            self.follow_scaler(optim_wrapper)
            inner: Any = self.module
            log_vars = inner.train_step(data, optim_wrapper)
            self.accelerator.compilation.materialize_all(self._devices)
            self.step_materialized = True
            log_norms(optim_wrapper)
        return log_vars

    def follow_scaler(self, optim_wrapper: AnyOptimWrapper) -> None:
        """See :meth:`DeviceDistributedDataParallel.follow_scaler`."""
        for part in self.parts:
            part.follow_scaler(optim_wrapper)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Skip the averaging of the gradients of all parts."""
        with ExitStack() as stack:
            for part in self.parts:
                stack.enter_context(part.no_sync())
            yield


def _is_trainable(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _check_own_parameters(module: nn.Module) -> None:
    own = [name for name, p in module.named_parameters(recurse=False) if p.requires_grad]
    if own:
        raise ModelError(
            f'{type(module).__name__} has trainable parameters of its own, {", ".join(own)}, '
            f'which belong to none of its children and would not be averaged; expected none. '
            f'Put them into a child module, or take '
            f"model_wrapper_cfg=dict(type='DeviceDistributedDataParallel')."
        )


def _check_children(module: nn.Module) -> None:
    _check_own_parameters(module)
    if not any(_is_trainable(child) for child in module.children()):
        children = ', '.join(name for name, _ in module.named_children())
        raise ModelError(
            f'no child of {type(module).__name__} has a parameter that requires a gradient '
            f'(children: {children or "none"}); expected at least one. Unfreeze part '
            f'of the model, or run it without a launcher.'
        )
