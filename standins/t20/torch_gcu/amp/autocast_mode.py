"""Autocast of 16-bit numbers, which PyTorch 1.10 switches for CUDA and XLA devices together."""

import functools

import torch
from t20_card import calls, card
from torch.cuda.amp.autocast_mode import _cast


class autocast:
    """Switches the autocast of the card's PyTorch: in 1.10, that of CUDA."""

    def __init__(self, enabled=True, dtype=torch.float16, cache_enabled=True):
        if dtype not in (torch.float16, torch.bfloat16):
            raise RuntimeError(
                f'Current GCU Device does not support {dtype}. '
                'Please switch dtype to float16 && bfloat16.'
            )
        self.fast_dtype = dtype
        self._enabled, self._cache_enabled = enabled, cache_enabled

    def __enter__(self):
        calls['autocast'] += 1
        self.prev, self.prev_fastdtype = card.autocast()
        self.prev_cache_enabled = torch.is_autocast_cache_enabled()
        self._switch(self._enabled, self.fast_dtype, self._cache_enabled)
        torch.autocast_increment_nesting()

    def __exit__(self, *error):
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        self._switch(self.prev, self.prev_fastdtype, self.prev_cache_enabled)
        return False

    def __call__(self, func):
        @functools.wraps(func)
        def decorate_autocast(*args, **kwargs):
            with self:
                return func(*args, **kwargs)

        return decorate_autocast

    @staticmethod
    def _switch(enabled, dtype, cache_enabled):
        card.set_autocast(enabled, dtype)
        torch.set_autocast_cache_enabled(cache_enabled)


def custom_fwd(fwd=None, **kwargs):
    """Run a custom function's ``forward`` under autocast, or without it on arguments cast before.

    Like the vendor's, it casts CUDA tensors alone: ``cast_inputs`` changes nothing on a card.
    """
    cast_inputs = kwargs.pop('cast_inputs', None)
    assert not kwargs, kwargs
    if fwd is None:
        return functools.partial(custom_fwd, cast_inputs=cast_inputs)

    @functools.wraps(fwd)
    def decorate_fwd(*args, **kwargs):
        casting = card.autocast()[0] and cast_inputs is not None
        args[0]._fwd_used_autocast = card.autocast()[0] and cast_inputs is None
        if not casting:
            return fwd(*args, **kwargs)
        with autocast(enabled=False):
            return fwd(*_cast(args, cast_inputs), **_cast(kwargs, cast_inputs))

    return decorate_fwd


def custom_bwd(bwd):
    """Run a custom function's ``backward`` under the autocast of its ``forward``."""

    @functools.wraps(bwd)
    def decorate_bwd(*args, **kwargs):
        with autocast(args[0]._fwd_used_autocast):
            return bwd(*args, **kwargs)

    return decorate_bwd
