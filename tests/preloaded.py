"""What runs import sooner or later: processes that are forked from a server find it there."""

import gc
from importlib.util import find_spec

import matplotlib.backends.backend_agg  # noqa: F401
import matplotlib.figure  # noqa: F401
import sklearn.datasets.data  # noqa: F401
import sklearn.datasets.descr  # noqa: F401
import torch.utils.cpp_extension  # noqa: F401
from yapf.yapflib.yapf_api import FormatCode

import mmdevplug.gradients
import mmdevplug.model.loss_check  # noqa: F401
from mmdevplug.hooks import communication_hook

FormatCode('grammar = 1')  # which it reads from a file the first time
#: A picture of each job would take a third of its time: the ranks of a test that looks at it
#: set this one again.
draw = communication_hook.draw
communication_hook.draw = lambda history, ranks, path: None

if find_spec('torch._dynamo') is not None:  # from PyTorch 2 on; the first optimizer imports it
    import torch._dynamo  # noqa: F401

# What is there before a fork is not looked through again by each process.
gc.freeze()
# Python's own, which standins/quick changed for these imports: ranks' memory is measured.
gc.set_threshold(700, 10, 10)
