"""Which lines the processes of a job run, for ``make coverage``.

coverage.py follows processes that start afresh. The ranks of :mod:`tests.ranks` are forked
from a server, and backward on a device calls hooks in threads that Python did not start.
"""

import functools
import os
import sys
import threading
import types

#: The file of settings, where lines are being counted.
SETTINGS = 'MMDEVPLUG_COVERAGE'


def measured(function, args):
    """Call ``function(*args)``, and write down the lines that it ran if they are being counted."""
    if SETTINGS not in os.environ:
        return function(*args)
    import coverage

    inherited = coverage.Coverage.current()
    if inherited is not None:
        inherited.stop()
    here = coverage.Coverage(config_file=os.environ[SETTINGS], data_suffix=True)
    here.start()
    _follow_backward()
    try:
        return function(*args)
    finally:
        here.stop()
        here.save()


def _follow_backward():
    """Trace methods that backward calls, in whichever thread it runs."""
    from mmdevplug.gradients import ddp_hook, lazy_staging
    from mmdevplug.model import normalize, statistics_exchange
    from mmdevplug.staged import (
        group_base,
        host_buffers,
        reductions,
        shared_sum,
        staged_group,
        work,
    )

    groups = (group_base, staged_group, reductions, shared_sum, work)
    staging = (lazy_staging, host_buffers, *groups)
    for module in (ddp_hook, statistics_exchange, normalize, *staging):
        for kind in vars(module).values():
            if isinstance(kind, type) and kind.__module__ == module.__name__:
                _follow_methods(kind)


def _follow_methods(kind):
    for name, value in list(vars(kind).items()):
        if isinstance(value, types.FunctionType):
            setattr(kind, name, _traced(value))
        elif isinstance(value, staticmethod):
            setattr(kind, name, staticmethod(_traced(value.__func__)))


def _traced(function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        if sys.gettrace() is None:
            sys.settrace(threading.gettrace())
        return function(*args, **kwargs)

    return call
