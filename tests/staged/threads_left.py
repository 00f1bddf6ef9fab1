"""Run a script, and fail if it leaves threads of gloo to the end of the interpreter.

``torchrun tests/staged/threads_left.py SCRIPT [its arguments]``
"""

import atexit
import os
import runpy
import sys
from pathlib import Path


def _fail_if_any() -> None:
    """Called after all that the script registers.

    Such a thread may hold tensors; one that frees them while Python ends aborts the process.
    """
    names = [path.read_text().strip() for path in Path('/proc/self/task').glob('*/comm')]
    left = names.count('pt_gloo_runloop')
    os.write(1, f'threads that run collectives: {left}\n'.encode())  # ranks share the pipe
    if left:
        os._exit(5)


atexit.register(_fail_if_any)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name='__main__')
