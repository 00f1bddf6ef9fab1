"""What runs import sooner or later: processes that are forked from a server find it there."""

import gc
from importlib.util import find_spec

import matplotlib.backends.backend_agg  # noqa: F401
import matplotlib.figure  # noqa: F401
import sklearn.datasets  # noqa: F401
import torch.utils.cpp_extension  # noqa: F401

if find_spec('torch._dynamo') is not None:  # from PyTorch 2 on; the first optimizer imports it
    import torch._dynamo  # noqa: F401

# What is there before a fork is not looked through again by each process.
gc.freeze()
# Python's own, which standins/quick changed for these imports: ranks' memory is measured.
gc.set_threshold(700, 10, 10)
