"""Running Python programs in processes that are forked with PyTorch and MMEngine imported.

This module imports neither: a program may have to start without MMEngine.
"""

import atexit
import os
import runpy
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from tests.measuring import measured
from tests.ranks import _ROOT, start_process

#: What the server has imported and a program may want to run as ``__main__``.
_MAIN = 'mmdevplug.cli.main'


#: The command of this package, for a Python that starts afresh.
CLI = (sys.executable, '-m', _MAIN)


def environment(*folders, **variables):
    """Variables for a process that starts afresh, and finds the packages of some folders first.

    Those of Slurm are left out, and those that are None.
    """
    from tests.jobs import PATHS  # which imports both

    kept = {name: value for name, value in os.environ.items() if not name.startswith('SLURM')}
    paths = os.pathsep.join([*map(str, folders), PATHS])
    found = dict(kept, PYTHONPATH=paths, PYTHON=sys.executable, OMP_NUM_THREADS='1')
    found.update(variables)
    return {name: value for name, value in found.items() if value is not None}


def run(*command, cwd=_ROOT, env=None, timeout=280, **options):
    """Run a program that starts afresh.

    Args:
        *command (str): The program and its arguments.
        cwd (str): Its working directory.
        env (dict, optional): All of its variables. Defaults to those of :func:`environment`.
        timeout (float): Seconds until it must have ended.
        **options: Of :func:`subprocess.run`.

    Returns:
        subprocess.CompletedProcess: Its exit status, and what it printed as text.
    """
    env = environment() if env is None else env
    options = options or dict(stderr=subprocess.PIPE)
    return subprocess.run(
        list(map(str, command)), cwd=str(cwd), env=env, timeout=timeout, text=True,
        stdout=subprocess.PIPE, **options,
    )  # fmt: skip


def python(*arguments, cwd=_ROOT, env=None, timeout=280, mmengine=True):
    """Run ``python ARGUMENTS`` without the seconds that imports take.

    For tests that look neither at signals, the end, the command line nor the import of PyTorch:
    those start a new Python with :mod:`subprocess`.

    Args:
        *arguments (str): ``-m MODULE``, ``-c CODE`` or a script, and its own arguments.
        cwd (str): Its working directory.
        env (dict, optional): All of its variables; ``PYTHONPATH`` counts, too.
        timeout (float): Seconds until it must have ended.
        mmengine (bool): Whether MMEngine and this package have been imported, as PyTorch has been.

    Returns:
        subprocess.CompletedProcess: Its exit status, and what it printed as text.

    Raises:
        subprocess.TimeoutExpired: If it has not ended by then.
    """
    arguments = list(map(str, arguments))
    with tempfile.TemporaryDirectory() as folder:
        printed = [Path(folder) / 'stdout', Path(folder) / 'stderr']
        given = (arguments, str(cwd), dict(os.environ if env is None else env), printed)
        process = start_process(_become, *given, mmengine=mmengine)
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired(arguments, timeout)
        out, err = (path.read_text() for path in printed)
    return subprocess.CompletedProcess(arguments, process.exitcode, out, err)


def wait_until(reached, seconds, told=str):
    """Look again and again until something is so.

    Args:
        reached (callable): Returns whether it is.
        seconds (float): After which to give up.
        told (callable): Returns what the error says then.

    Raises:
        AssertionError: If it is not so by then.
    """
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline, told()
        time.sleep(0.05)


def _become(arguments, cwd, env, printed):
    sys.stdout.flush()  # what the server's imports have printed
    for number, path in enumerate([os.devnull, *printed]):
        copy = os.open(path, os.O_RDWR | os.O_CREAT)
        os.dup2(copy, number)
        os.close(copy)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None
    first = {'-m': cwd, '-c': ''}.get(arguments[0], os.path.dirname(arguments[0]))
    paths = [path for path in env.get('PYTHONPATH', '').split(os.pathsep) if path]
    sys.path[:] = [first, *paths, *[path for path in sys.path if path]]
    import torch

    torch.set_num_threads(1)
    try:
        measured(_run, arguments)
    except SystemExit:
        raise
    except BaseException as error:
        # Without the frames of this file, and in one place with what the interpreter prints.
        sys.excepthook(type(error), error, error.__traceback__)
        raise SystemExit(1) from None
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()


def _run(kind, *rest):
    if kind == '-c':
        code, *rest = rest
        sys.argv = ['-c', *rest]
        exec(compile(code, '<string>', 'exec'), dict(__name__='__main__'))
    elif kind == '-m':
        name, *rest = rest
        sys.argv = [name, *rest]
        if name == _MAIN:
            from mmdevplug.cli.main import main

            sys.exit(main())
        runpy.run_module(name, run_name='__main__', alter_sys=True)
    else:
        sys.argv = [kind, *rest]
        runpy.run_path(kind, run_name='__main__')
