"""On PYTHONPATH, and in ranks of tests, MMEngine formats no config.

That takes half of a small training. It does so five times in each: for the log, the dump, the
checkpoint and the visualizer.
"""

__version__ = '0.43.0'
