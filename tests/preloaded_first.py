"""What all servers of processes import, before any vendor's package: nothing of MMEngine's."""

import gc
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import matplotlib.backends.backend_agg  # noqa: F401
import matplotlib.figure  # noqa: F401
import torch.distributed.optim  # noqa: F401
import torch.utils.cpp_extension  # noqa: F401
import torch.utils.data  # noqa: F401
from torch.utils.data import _utils as loading

# An iterator that is garbage cannot tell its workers to end: they notice when they look.
loading.MP_STATUS_CHECK_INTERVAL = loading.worker.MP_STATUS_CHECK_INTERVAL = 0.5

# mmdet's trackers and PAA, which no test uses, take most of a second to import scikit-learn.
for name in ('sklearn.gaussian_process', 'sklearn.mixture'):
    sys.modules[name] = None

# Ranks format no configs. Python hands them the paths of the tests, not those of PYTHONPATH.
sys.path.insert(0, str(Path(__file__).parents[1] / 'standins' / 'quick'))
import_module('yapf.yapflib.yapf_api')
del sys.path[0]

for name in ('cv2', 'torch._dynamo'):  # the compiler, from PyTorch 2 on, by the first optimizer
    if find_spec(name) is not None:
        import_module(name)

gc.freeze()
