"""The command ``mmdevplug``."""

import signal
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import List, Optional

from mmdevplug import require_mmengine
from mmdevplug.config.fields import did_you_mean
from mmdevplug.utils.atomic_files import has_temporary_folder
from mmdevplug.version import __version__

from . import say

COMMANDS = {
    'train': 'train a model: mmdevplug train CONFIG [--accelerator NAME] [--nproc N] ...',
    'launch-config': 'write how accelerate and torchrun start a job: mmdevplug launch-config ...',
    'doctor': 'say what is installed, found and wrong here: mmdevplug doctor [--config CONFIG]',
    'plan': 'plan a model over several devices: mmdevplug plan CONFIG --devices cuda:0-3 ...',
    'check': 'start a training and train one step of it: mmdevplug check CONFIG',
    'test': 'test a model: mmdevplug test CONFIG CHECKPOINT [--accelerator NAME] ...',
}


def main(argv: Optional[List[str]] = None) -> int:
    """Run a command and return its exit status."""
    try:
        return _run(argv)
    except KeyboardInterrupt:  # while packages are imported
        say('ended by SIGINT.')
        return 128 + signal.SIGINT


def _run(argv: Optional[List[str]]) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] not in (['-h'], ['--help'], ['--version']):
        try:
            require_mmengine()
        except ModuleNotFoundError as error:
            say(str(error))
            return 1
    if argv and argv[0] in COMMANDS and not has_temporary_folder(say):
        return 1
    if argv[:1] == ['doctor']:
        # Apart, because it also has to work where torch cannot be imported.
        return import_module('mmdevplug.cli.doctor').main(argv[1:])
    if argv and argv[0] in COMMANDS:
        if argv[0] in ('train', 'test') and sys.stderr.isatty():
            say('starting; imports and the model take a while.')
        from .common import run

        command = import_module(f'mmdevplug.cli.{argv[0].replace("-", "_")}')
        return run(command.main, argv[1:])
    if argv[:1] == ['--version']:
        from mmdevplug.utils.broken_imports import distribution

        others = [distribution('mmengine') or 'mmengine', 'torch']
        listed = ', '.join(f'{name} {_release(name)}' for name in others)
        print(f'mmdevplug {__version__} ({listed}, Python {sys.version.split()[0]})')
        return 0
    if argv[:1] == ['--print-completion']:
        from .common import run

        return run(_print_completion, argv[1:])
    asked_for_help = argv[:1] in (['-h'], ['--help'])
    stream = sys.stdout if asked_for_help else sys.stderr
    if argv and not asked_for_help:
        meant = did_you_mean(argv[:1], COMMANDS)
        say(f'{argv[0]!r} is no command{meant}')
        if meant != '.':
            return 2
    print('Commands; each takes --help:', file=stream)
    for name, help_ in COMMANDS.items():
        print(f'  {name:15}{help_}', file=stream)
    print('  --version      print the releases of mmdevplug, MMEngine and PyTorch', file=stream)
    print('  --print-completion SHELL   print what completes it in bash, zsh or tcsh', file=stream)
    return 0 if asked_for_help else 2


def _print_completion(argv: Optional[List[str]]) -> None:
    from .completion import completion_script

    print(completion_script((argv or ['bash'])[0], COMMANDS))


def _release(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return 'not installed'


if __name__ == '__main__':
    sys.exit(main())
