"""Print a script with which a shell completes ``mmdevplug``; shtab makes it from the parsers."""

import argparse
from importlib import import_module
from typing import Iterable

from mmdevplug.errors import DevPlugError

#: Arguments that are paths.
FILES = ('config', 'checkpoint', 'model', 'out', 'json', 'resume')
FOLDERS = ('work_dir',)


def completion_script(shell: str, commands: Iterable[str]) -> str:
    """Return the script for a shell.

    Args:
        shell (str): ``'bash'``, ``'zsh'`` or ``'tcsh'``.
        commands (Iterable[str]): The names of the commands.

    Raises:
        DevPlugError: If shtab is not installed or does not know the shell.
    """
    try:
        shtab = import_module('shtab')
    except ModuleNotFoundError as error:
        raise DevPlugError(
            "--print-completion needs the package shtab: pip install 'mmdevplug[completion]'"
        ) from error
    if shell not in shtab.SUPPORTED_SHELLS:
        raise DevPlugError(
            f'--print-completion {shell}: expected {" or ".join(shtab.SUPPORTED_SHELLS)}.'
        )
    parser = argparse.ArgumentParser(prog='mmdevplug')
    parser.add_argument('--version', action='store_true', help='print the releases')
    inner = parser.add_subparsers()
    for name in commands:
        module = import_module(f'mmdevplug.cli.{name.replace("-", "_")}')
        own = module.build_parser()
        for action in own._actions:
            if action.dest in FILES and action.nargs != 0:
                action.complete = shtab.FILE
            elif action.dest in FOLDERS:
                action.complete = shtab.DIRECTORY
        inner.add_parser(name, parents=[own], add_help=False, help=own.description)
    return shtab.complete(parser, shell=shell)
