"""Import what ranks import, in the process that they are forked from.

:mod:`multiprocessing` imports this module there, see :func:`mmdevplug.cli.launch.launch`.
"""

import atexit
import gc
import sys
from importlib import import_module
from importlib.util import find_spec
from types import TracebackType
from typing import Optional

# Collecting garbage takes 0.6 s of these imports. Frozen, it is left to no rank either, and the
# memory stays shared.
gc.disable()
for _name in (
    *('mmengine.runner', 'mmdevplug.runner', 'mmdevplug.cli.train', 'torch._dynamo', 'mmcv'),
    *('matplotlib.figure', 'matplotlib.backends.backend_agg'),  # by MMEngine's visualizer
):
    if find_spec(_name) is not None:  # no mmcv, or PyTorch 1
        try:
            import_module(_name)
        except Exception:  # Each rank meets it as well, and says what it is.
            break
gc.freeze()
gc.enable()
# Triton, which CUDA builds of PyTorch 2.15 import, lists all that is frozen at the end as leaked.
atexit.register(gc.unfreeze)


def _hide_end_of_command(kind: type, error: BaseException, trace: Optional[TracebackType]) -> None:
    """Say nothing where a signal ends the command while it asks this process for a rank."""
    if kind not in (EOFError, FileNotFoundError):  # Python 3.8 misses the command's semaphores
        sys.__excepthook__(kind, error, trace)


sys.excepthook = _hide_end_of_command
