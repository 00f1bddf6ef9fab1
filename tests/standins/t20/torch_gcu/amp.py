"""Mixed precision as the vendor offers it."""

import torch


def autocast(enabled=True, dtype=torch.float16, cache_enabled=True):
    return torch.autocast('xla', dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)


GradScaler = torch.amp.GradScaler
