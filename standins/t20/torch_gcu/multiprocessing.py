"""Starting a process for each card."""

import sys
import traceback

import torch.multiprocessing


def _start(index, fn, args):
    code = 0
    try:
        fn(index, *args)
    except Exception as error:
        print(f'Exception in device=xla:{index}  {error}', file=sys.stderr)
        traceback.print_exc(limit=16, file=sys.stderr)
        code = 17
    sys.exit(code)


def spawn(fn, args=(), nprocs=None, join=True, daemon=False, start_method='spawn'):
    return torch.multiprocessing.start_processes(
        _start, args=(fn, args), nprocs=nprocs, join=join, daemon=daemon, start_method=start_method
    )


class MpSerialExecutor:
    """Runs functions of several processes one after the other."""

    def __init__(self):
        self._lock = torch.multiprocessing.Lock()

    def run(self, fn):
        with self._lock:
            return fn()
