"""Running ``tools/check.py`` and reading what it prints."""

import sys

from mmdevplug.cli.check import main
from tests.cli.running import STANDIN, call
from tests.ranks import run_ranks


def check(arguments, folder):
    """What ``tools/check.py`` does, in a process that has imported most of it already."""
    sys.path[:0] = [str(folder), STANDIN]
    return call(main, *arguments)


def checked(*arguments, folder='.', **environ):
    (found,) = run_ranks(check, 0, arguments, folder, environ=environ)
    return found
