"""Running ``tools/check.py`` and reading what it prints."""

import io
import sys
from contextlib import redirect_stderr, redirect_stdout

from mmdevplug.cli.check import main
from mmdevplug.cli.common import run
from tests.cli.running import STANDIN
from tests.ranks import run_ranks


def check(arguments, folder):
    """What ``tools/check.py`` does, in a process that has imported most of it already."""
    sys.path[:0] = [str(folder), STANDIN]
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            status = run(main, list(map(str, arguments)))
        except SystemExit as ended:
            status = ended.code
    return status, out.getvalue(), err.getvalue()


def checked(*arguments, folder='.', **environ):
    (found,) = run_ranks(check, 0, arguments, folder, environ=environ)
    return found
