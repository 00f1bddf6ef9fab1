"""Gradient scaling, with the fault that the vendor's has."""

from collections import defaultdict

import torch

try:
    from torch.amp.grad_scaler import GradScaler as _Scaler, OptState, _refresh_per_optimizer_state
except ImportError:  # PyTorch before 2.3
    from torch.cuda.amp.grad_scaler import (  # noqa: F401
        GradScaler as _Scaler,
        OptState,
        _refresh_per_optimizer_state,
    )

import torch_gcu


class GradScaler:
    """PyTorch's scaler, of which it is no subclass, as the vendor's is none.

    ``step`` without ``use_zero_grad`` ends in a TypeError: the vendor's calls ``unlazy`` with an
    argument that ``unlazy`` does not have.
    """

    def __init__(
        self,
        init_scale=2.0**16,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=2000,
        enabled=True,
        use_zero_grad=False,
    ):
        self._enabled = enabled
        if not enabled:
            return
        assert growth_factor > 1.0, 'The growth factor must be > 1.0.'
        assert backoff_factor < 1.0, 'The backoff factor must be < 1.0.'
        self._init_scale, self._scale = init_scale, None
        self._init_growth_tracker, self._growth_tracker = 0, None
        self._growth_factor, self._backoff_factor = growth_factor, backoff_factor
        self._growth_interval = growth_interval
        self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
        self._use_zero_grad = use_zero_grad

    def scale(self, outputs):
        if self._enabled and isinstance(outputs, torch.Tensor):
            assert outputs.device.type == 'xla'
        return _Scaler.scale(self, outputs)

    def _maybe_opt_step(self, optimizer, optimizer_state, *args, **kwargs):
        found = list(optimizer_state['found_inf_per_device'].values())
        if not self._use_zero_grad:
            if found and found[0].device.type == 'xla':
                torch_gcu.unlazy([], device=str(found[0].device))
            if any(value.item() for value in found):
                return None
            return optimizer.step(*args, **kwargs)
        factor = (torch.stack(found).sum() == 0).float()
        for gradient in torch_gcu.fetch_gradients(optimizer):
            gradient.nan_to_num_()
            gradient.mul_(factor)
        return optimizer.step(*args, **kwargs)

    _check_scale_growth_tracker = _Scaler._check_scale_growth_tracker
    _lazy_init_scale_growth_tracker = _Scaler._lazy_init_scale_growth_tracker
    _unscale_grads_ = _Scaler._unscale_grads_
    unscale_ = _Scaler.unscale_
    step = _Scaler.step
    update = _Scaler.update
    _get_scale_async = _Scaler._get_scale_async
    get_scale = _Scaler.get_scale
    get_growth_factor = _Scaler.get_growth_factor
    set_growth_factor = _Scaler.set_growth_factor
    get_backoff_factor = _Scaler.get_backoff_factor
    set_backoff_factor = _Scaler.set_backoff_factor
    get_growth_interval = _Scaler.get_growth_interval
    set_growth_interval = _Scaler.set_growth_interval
    _get_growth_tracker = _Scaler._get_growth_tracker
    is_enabled = _Scaler.is_enabled
    state_dict = _Scaler.state_dict
    load_state_dict = _Scaler.load_state_dict
    __getstate__ = _Scaler.__getstate__
    __setstate__ = _Scaler.__setstate__
    _check_inf_per_device = _Scaler._check_inf_per_device
    _found_inf_per_device = _Scaler._found_inf_per_device
