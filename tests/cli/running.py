"""Commands as a user types them, in processes of their own or in this one."""

import io
from contextlib import redirect_stderr, redirect_stdout

from mmdevplug.cli import common
from tests.commands import environment, python
from tests.jobs import ROOT

#: The digits example on the CPU, below the checkout and as a whole path; and for any device.
CONFIG = 'configs/digits/digits_cpu.py'
DIGITS = str(ROOT / CONFIG)
#: What a config inherits: the example on the CPU, on no device, on whatever device there is.
ON_CPU, PLAIN = repr(DIGITS), repr(str(ROOT / 'configs' / 'digits' / 'digits.py'))
AUTO = f"{PLAIN}, __import__('mmdevplug').base_config('auto')"
#: A training of one epoch, without a validation.
SHORT = ('--cfg-options', 'train_cfg.max_epochs=1', 'train_cfg.val_interval=2')
STANDIN = str(ROOT / 'standins' / 'fakecard')


def mmdevplug(folder, *arguments, **options):
    """A command in a process that finds the packages of a folder first, with options for it."""
    command = ('-m', 'mmdevplug.cli.main', *arguments)
    return python(*command, cwd=folder, env=environment(folder), **options)


def with_card(*arguments, **environ):
    """A command in a process of the checkout that finds the stand-in card."""
    return python('-m', 'mmdevplug.cli.main', *arguments, env=environment(STANDIN, **environ))


def config(folder, lines, imports=(), base=ON_CPU):
    """A config that inherits the digits example, and imports modules besides it."""
    path = folder / 'config.py'
    if imports:
        imports = ['mmdevplug', *imports, 'mmdevplug.examples.digits']
        lines = f'custom_imports = dict(imports={imports!r})\n{lines}'
    path.write_text(f'_base_ = [{base}]\n{lines}\n')
    return path


def only_message(done):
    """The only line for the user; no traceback."""
    assert done.returncode == 1, done.stderr
    assert 'Traceback' not in done.stderr, done.stderr
    told = [line for line in done.stderr.splitlines() if line.startswith('mmdevplug: ')]
    assert len(told) == 1, done.stderr
    return told[0]


def call(command, *arguments):
    """Call the function of a command: its exit status, and what it prints."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            status = common.run(command, list(map(str, arguments)))
        except SystemExit as ended:
            status = ended.code
    return status, out.getvalue(), err.getvalue()


def only_line(command, *arguments):
    """The only line of a command that is refused."""
    status, _, printed = call(command, *arguments)
    assert status == 1, printed
    (line,) = printed.splitlines()
    assert line.startswith('mmdevplug: ')
    assert 'Traceback' not in line
    return line
