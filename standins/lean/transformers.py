"""On PYTHONPATH, transformers is as if it were not installed.

MMEngine imports it for the sake of one optimizer, where it finds it, which takes a process longer
than the rest of its start.
"""

raise ModuleNotFoundError("No module named 'transformers'", name='transformers')
