"""Mixed precision as the vendor offers it."""

import torch


def autocast(enabled=True, dtype=torch.float16, cache_enabled=True):
    return torch.autocast('xla', dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)


class GradScaler(torch.amp.GradScaler):
    """With the arguments of ``torch.cuda.amp.GradScaler``, which names no device."""

    def __init__(
        self,
        init_scale=2.0**16,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=2000,
        enabled=True,
    ):
        super().__init__(
            'xla', init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )
