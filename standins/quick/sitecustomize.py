"""On PYTHONPATH, Python collects no garbage while it imports PyTorch, nor when it ends.

A collection looks through everything that was imported, which takes a process of a test a third of
its time. Collections still happen, when many more objects have been made.
"""

import atexit
import gc
import sys

gc.set_threshold(100_000, 20, 100)
# Registered first, so called last.
atexit.register(lambda: 'triton' in sys.modules or gc.freeze())  # it lists what is left
