"""Record what commands print in a terminal as SVG: ``python docs/record_terminal.py``.

It runs the commands below in a terminal and writes docs/images. Long outputs are cut: a recording
shows the lines that match, in their order.
"""

import argparse
import os
import pty
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Dict, List, NamedTuple, Pattern

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / 'docs' / 'images'
COLUMNS = 108
CONFIG = 'configs/digits/digits_cpu.py'


class Recording(NamedTuple):
    """A command and what of its output is shown.

    Attributes:
        command (str): As it is typed.
        shown (Pattern): Of the lines that are kept.
        many (Pattern): Of lines of which a section shows the first two.
    """

    command: str
    shown: Pattern
    many: Pattern


RECORDINGS: Dict[str, Recording] = dict(
    doctor=Recording(
        f'mmdevplug doctor --nproc 2 --config {CONFIG}',
        re.compile(
            r'^(versions|accelerators|launch|network|limits|patches|config|collectives)\b'
            r'|│ ok|\d ok'
        ),
        re.compile(r'import .* works|host name|loopback|ok +│ (mm|torch|sys)[\w.]*: '),
    ),
)
#: The title of a section of the doctor.
SECTION = re.compile(r'\w+ *')
#: A row of a table: level, what was found, and nothing but borders around them.
ROW = re.compile(r'^│ (\S+) +│ (.*?) *│$')


def run(command: str) -> str:
    """Run a command of this package in a terminal.

    Args:
        command (str): Begins with ``mmdevplug``.

    Returns:
        str: What it printed, with the terminal's colours.
    """
    ours, theirs = pty.openpty()
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, '-W', 'ignore', '-m', 'mmdevplug.cli.main', *command.split()[1:]]
        work_dir = os.path.join(folder, 'work_dir')
        environ = dict(os.environ, COLUMNS=str(COLUMNS), OMP_NUM_THREADS='1', MKL_NUM_THREADS='1')
        environ.update(PYTHONWARNINGS='ignore', TERM='xterm-256color')
        process = subprocess.Popen(
            [*words, '--work-dir', work_dir],
            cwd=str(ROOT),
            env=environ,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
        )
        os.close(theirs)
        output = _read(ours)
        if process.wait() != 0:
            raise SystemExit(f'{command} ended with status {process.returncode}:\n{output}')
    return output.replace(folder, '/tmp')


def _read(terminal: int) -> str:
    parts: List[bytes] = []
    while True:
        try:
            part = os.read(terminal, 1 << 16)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        parts.append(part)
    return b''.join(parts).decode('utf-8', errors='replace').replace('\r\n', '\n')


def shorten(output: str, recording: Recording) -> List[Text]:
    """Keep the lines that are shown, and few of those that are many.

    Args:
        output (str): All that was printed.
        recording (Recording): What is shown.

    Returns:
        List[Text]: Lines, with an ellipsis where some were left out.
    """
    kept: List[Text] = []
    many = 0
    lines = [Text.from_ansi(line) for line in output.splitlines()]
    for line, following in zip(lines, [*lines[1:], Text()]):
        if not recording.shown.search(line.plain):
            continue
        if SECTION.fullmatch(line.plain):
            many = 0
        many += bool(recording.many.search(line.plain))
        if many > 2 and recording.many.search(line.plain):
            if kept[-1].plain.strip() != '...':
                kept.append(Text('  ...'))
            continue
        kept.append(_tidy_row(line, following))
    return kept


def tidy(line: Text) -> Text:
    """Drop the time of a log line."""
    start = re.match(r'\S+ \S+ - mmengine - ', line.plain)
    return line[start.end() :] if start else line


def _tidy_row(line: Text, following: Text) -> Text:
    """Drop the time of a log line, and the borders of a row."""
    row = ROW.match(line.plain)
    if row is None:
        return tidy(line)
    goes_on = re.match(r'^│ +│ \S', following.plain)
    return Text.assemble(
        '  ', (row.group(1), 'green'), '  ', row.group(2) + (' ...' if goes_on else '')
    )


def as_svg(name: str, command: str, lines: List[Text]) -> str:
    """Draw a terminal that shows a command and lines; ids in it begin with ``name``."""
    with open(os.devnull, 'w') as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True)
        console.print(f'$ {command}', style='bold', highlight=False)
        for line in lines:
            console.print(line, highlight=False)
        svg = console.export_svg(title=command, theme=MONOKAI, unique_id=name)
    # Nothing is to be loaded from elsewhere: any monospace font will do.
    return re.sub(r'@font-face \{.*?\}\s*', '', svg, flags=re.DOTALL)


def main() -> None:
    """Run the commands and write ``docs/images/<name>.svg``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('names', nargs='*', default=list(RECORDINGS), help=', '.join(RECORDINGS))
    for name in parser.parse_args().names:
        recording = RECORDINGS[name]
        svg = as_svg(name, recording.command, shorten(run(recording.command), recording))
        (IMAGES / f'{name}.svg').write_text(svg, encoding='utf-8')


if __name__ == '__main__':
    main()
