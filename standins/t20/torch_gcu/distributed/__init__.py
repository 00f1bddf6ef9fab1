"""The vendor's fork of ``torch.distributed``, with the one backend ``eccl``."""

import torch

if not torch.cuda.is_available():
    from .distributed_c10d import *  # noqa: F403
    from .distributed_c10d import _all_gather_base, _reduce_scatter_base  # noqa: F401

    def is_available():
        return True
