"""Mixed precision on any device."""

import math
from contextlib import contextmanager
from typing import (
    TYPE_CHECKING,
    Any,
    Dict,
    Iterable,
    Iterator,
    Optional,
    Protocol,
    Sequence,
    Union,
)

import torch
from mmengine.dist import all_reduce, get_world_size
from mmengine.optim import AmpOptimWrapper, OptimWrapper
from mmengine.registry import OPTIM_WRAPPERS
from torch import nn

from mmdevplug.accelerators import enter_rank_device, rank_context
from mmdevplug.errors import ModelError
from mmdevplug.patches.autocast import patch_autocast
from mmdevplug.utils.annotations import AnyOptimWrapper
from mmdevplug.utils.logs import log_warning
from mmdevplug.utils.model import list_optim_wrappers

from .device_optim_wrapper import DeviceOptimWrapper

if TYPE_CHECKING:
    from typing_extensions import TypeGuard


class OverflowSource(Protocol):
    """What averages gradients, and knows whether they overflowed."""

    finite: bool

    def covers(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether it has looked at the gradients of all these parameters."""


@OPTIM_WRAPPERS.register_module()
class DeviceAmpOptimWrapper(DeviceOptimWrapper, AmpOptimWrapper):
    """MMEngine's mixed precision on any device.

    Losses are scaled in float16 alone. Gradients are averaged before they are unscaled and
    clipped, and all ranks skip a step together when any of them found an overflow.

    Args:
        loss_scale (str, float or dict): ``'dynamic'``, a fixed scale, or arguments of the
            gradient scaler, as in :class:`mmengine.optim.AmpOptimWrapper`. bfloat16 needs none
            and ignores any other value with a warning. Defaults to ``'dynamic'``.
        dtype (str or torch.dtype, optional): ``'bfloat16'`` or ``'float16'``. Defaults to None:
            that of the accelerator, bfloat16 on the CPU and XLA and float16 on a T20 GCU.
        **kwargs: See :class:`mmengine.optim.OptimWrapper`.

    Raises:
        ModelError: If an argument has a value that does not work.
        AcceleratorError: If ``dtype`` is float16 and the accelerator has no gradient scaler.
    """

    #: The :class:`LazyStaging` of the model, which knows whether gradients overflowed.
    averaging: Optional[OverflowSource] = None
    lost = None  # MMEngine's refuses the device
    promises = dict(step='ranks may not skip the same updates after an overflow')

    def __init__(
        self,
        loss_scale: Union[str, float, Dict[str, object]] = 'dynamic',
        dtype: Optional[Union[str, torch.dtype]] = None,
        **kwargs: object,
    ) -> None:
        # Not AmpOptimWrapper's, which asserts that there is a device of MMEngine's list.
        OptimWrapper.__init__(self, **kwargs)
        self.accelerator, self.device = enter_rank_device()
        patch_autocast(self.accelerator)
        self.precision = self.accelerator.precision  # torch.compile cannot trace a cached property
        self.cast_dtype = _read_dtype(dtype, self.valid_dtypes) or self.precision.dtype
        options = _read_loss_scale(loss_scale)
        self._scale_update_param = options['init_scale'] if _is_number(loss_scale) else None
        self.loss_scaler = self._build_scaler(loss_scale, options)

    def _build_scaler(self, loss_scale: object, options: Dict[str, object]) -> Any:
        if self.cast_dtype != torch.float16:
            if loss_scale != 'dynamic':
                log_warning(
                    f'optim_wrapper.loss_scale={loss_scale!r} is ignored: {self.cast_dtype} needs '
                    f'no loss scaling. Remove the key.'
                )
            return _no_scaler()
        try:
            return self.accelerator.precision.grad_scaler(**options)
        except (AssertionError, TypeError) as error:
            raise ModelError(
                f'optim_wrapper.loss_scale={loss_scale!r}: the gradient scaler of accelerator '
                f'{self.accelerator.name!r} refuses it: {error}. Expected arguments are '
                f'init_scale, growth_factor > 1, backoff_factor < 1 and growth_interval.'
            ) from error

    def step(self, **kwargs: object) -> None:
        """Unscale, clip, and update the parameters unless a gradient of any rank overflowed.

        Args:
            **kwargs: Passed to :meth:`torch.optim.Optimizer.step`.
        """
        source = self._overflow_source()
        known, finite = source is not None, source is None or source.finite
        if self.loss_scaler.is_enabled():
            self.loss_scaler.unscale_(self.optimizer)
            if not known:
                finite = self._agree_on_overflow()
        if self.clip_grad_kwargs:
            self._clip_grad()
        if self.precision.scaler_steps and not known:
            self.loss_scaler.step(self.optimizer, **kwargs)
        elif finite:
            # Not the scaler's step: it would read from the device whether there was an overflow,
            # and that of torch_gcu 1.10 ends in a TypeError.
            self.optimizer.step(**kwargs)
        self.loss_scaler.update(self._scale_update_param)

    def _overflow_source(self) -> Optional[OverflowSource]:
        """What knows already whether a gradient overflowed; None if nothing has looked."""
        if self.averaging is None or not self.loss_scaler.is_enabled():
            return None
        covered = self.averaging.covers(
            parameter
            for group in self.optimizer.param_groups
            for parameter in group['params']
            if parameter.grad is not None
        )
        return self.averaging if covered else None

    def _agree_on_overflow(self) -> bool:
        """Make all ranks skip a step if one has to, also where gradients are not averaged.

        Returns:
            bool: Whether no gradient overflowed. An eager device that trains alone is not asked:
            the scaler reads it anyway.
        """
        states = getattr(self.loss_scaler, '_per_optimizer_states', {})
        found = list(states[id(self.optimizer)]['found_inf_per_device'].values()) if states else []
        # Otherwise each value that is read next runs a graph for itself alone.
        self.accelerator.compilation.materialize_all(rank_context().devices, found)
        if get_world_size() == 1 and self.precision.scaler_steps:
            return True
        mine = max(map(float, found), default=0.0)
        agreed = torch.tensor(mine)
        all_reduce(agreed, op='max')
        if float(agreed) > mine:
            for value in found:
                value.fill_(float(agreed))
        return not float(agreed)

    @contextmanager
    def optim_context(self, model: nn.Module) -> Iterator[None]:
        """Cast inside, and skip the averaging of gradients while they accumulate."""
        with OptimWrapper.optim_context(self, model):
            with self.precision.autocast(dtype=self.cast_dtype):
                yield

    def state_dict(self) -> dict:
        """Return the optimizer's state and, where losses are scaled, ``loss_scaler``."""
        state_dict = super().state_dict()
        if not state_dict['loss_scaler']:
            # An enabled scaler, of MMEngine's or ours, refuses to load an empty state.
            del state_dict['loss_scaler']
        return state_dict


def set_overflow_source(
    optim_wrapper: AnyOptimWrapper, averaging: Optional[OverflowSource]
) -> None:
    """Let optimizer wrappers ask the host staging for an overflow, instead of the device."""
    for wrapper in list_optim_wrappers(optim_wrapper):
        if isinstance(wrapper, DeviceAmpOptimWrapper):
            wrapper.averaging = averaging


def _is_number(value: object) -> 'TypeGuard[float]':
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _read_dtype(
    dtype: Union[None, str, torch.dtype], valid: Sequence[str]
) -> Optional[torch.dtype]:
    known: Dict[str, torch.dtype] = {name: getattr(torch, name) for name in valid}
    named = known.get(dtype) if isinstance(dtype, str) else dtype
    if dtype is not None and named not in known.values():
        raise ModelError(
            f'optim_wrapper.dtype={dtype!r}: expected one of {", ".join(map(repr, valid))}, or '
            f"no key for the accelerator's default. Only 'bfloat16' and 'float16' save time or "
            f'memory.'
        )
    return named


def _read_loss_scale(loss_scale: object) -> Dict[str, object]:
    """Return the arguments of the gradient scaler."""
    if isinstance(loss_scale, str) and loss_scale == 'dynamic':
        return {}
    if isinstance(loss_scale, dict):
        return dict(loss_scale)
    if _is_number(loss_scale) and math.isfinite(loss_scale) and loss_scale > 0:
        return dict(init_scale=float(loss_scale))
    raise ModelError(
        f"optim_wrapper.loss_scale={loss_scale!r}: expected 'dynamic', a number above 0, or a "
        f'dict of arguments such as dict(init_scale=512.0). Correct the key.'
    )


def _no_scaler() -> object:
    """Return a disabled scaler, for code that reads it from the wrapper."""
    newer = getattr(getattr(torch, 'amp', None), 'GradScaler', None)
    return (newer or torch.cuda.amp.GradScaler)(enabled=False)
