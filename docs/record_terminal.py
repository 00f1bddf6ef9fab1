"""Record what commands print in a terminal as SVG: ``python docs/record_terminal.py``.

It runs the commands below in a terminal and writes docs/images. Of long outputs a recording shows
some paragraphs, in their order.
"""

import argparse
import os
import pty
import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Dict, List, Mapping, Pattern, Sequence, Tuple

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / 'docs' / 'images'
COLUMNS = 108


#: What is typed, and how the paragraphs of its output begin that are shown.
Typed = Tuple[str, Pattern]

SEGFORMER = 'segformer_mit-b5_8xb1-160k_cityscapes-1024x1024.py'

RECORDINGS: Dict[str, Tuple[Typed, ...]] = dict(
    plan_segformer=(
        (f'mmdevplug plan {SEGFORMER} --devices xla:0-3 --training', re.compile('EncoderDecoder')),
    )
)
#: Folders in which commands are typed, where that is not the checkout.
FOLDERS = {'plan_segformer': ('mmseg', '.mim/configs/segformer')}


def run(command: str, folder: Path = ROOT, statuses: Sequence[int] = (0,)) -> str:
    """Run a command of this package in a terminal.

    Args:
        command (str): Begins with ``mmdevplug``, or with variables before it.
        folder (Path): Where it is typed.
        statuses (Sequence[int]): Exit statuses with which it may end.

    Returns:
        str: What it printed, with the terminal's colours.
    """
    words = command.split()
    start = words.index('mmdevplug')
    variables = dict(word.split('=', 1) for word in words[:start])
    name, *arguments = words[start + 1 :]
    with tempfile.TemporaryDirectory() as scratch:
        if name == 'train':
            arguments += ['--work-dir', os.path.join(scratch, 'work_dir')]
        run_words = [sys.executable, '-W', 'ignore', '-m', 'mmdevplug.cli.main', name, *arguments]
        return run_in_terminal(run_words, variables, folder, statuses).replace(scratch, '/tmp')


def run_in_terminal(
    words: Sequence[str],
    variables: Mapping[str, str],
    folder: Path = ROOT,
    statuses: Sequence[int] = (0,),
) -> str:
    """Run a program in a terminal and return what it printed."""
    ours, theirs = pty.openpty()
    environ = dict(os.environ, COLUMNS=str(COLUMNS), OMP_NUM_THREADS='1', MKL_NUM_THREADS='1')
    environ.update(PYTHONWARNINGS='ignore', TERM='xterm-256color', **variables)
    process = subprocess.Popen(
        list(words), cwd=str(folder), env=environ, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    output = _read(ours)
    if process.wait() not in statuses:
        raise SystemExit(f'{words} ended with status {process.returncode}:\n{output}')
    # What a progress line wrote and erased again, the line above the cursor included.
    for erased in (r'\x1b\[\?25[lh]', r'[^\n]*\n\r?\x1b\[1A', r'[^\n]*\x1b\[2K'):
        output = re.sub(erased, '', output)
    return output


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


def keep(output: str, first: Pattern) -> List[Text]:
    """Keep the paragraphs whose first line matches, a blank line between two."""
    kept: List[Text] = []
    for paragraph in re.split(r'\n\s*\n', output):
        lines = [Text.from_ansi(line) for line in paragraph.strip('\n').splitlines()]
        if lines and first.match(lines[0].plain):
            kept += [Text(), *lines] if kept else lines
    return kept


def tidy(line: Text) -> Text:
    """Drop the time of a log line."""
    start = re.match(r'\S+ \S+ - mmengine - ', line.plain)
    return line[start.end() :] if start else line


def as_svg(name: str, session: Sequence[Tuple[str, List[Text]]]) -> str:
    """Draw a terminal that shows commands and lines; ids in it begin with ``name``."""
    with open(os.devnull, 'w') as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True)
        for number, (command, lines) in enumerate(session):
            if number:
                console.print()
            console.print(f'$ {command}', style='bold', highlight=False)
            for line in lines:
                console.print(line, highlight=False)
        svg = console.export_svg(title=session[0][0], theme=MONOKAI, unique_id=name)
    # Nothing is to be loaded from elsewhere: any monospace font will do.
    return re.sub(r'@font-face \{.*?\}\s*', '', svg, flags=re.DOTALL)


def folder_of(name: str) -> Path:
    """Where the commands of a recording are typed."""
    if name not in FOLDERS:
        return ROOT
    module, below = FOLDERS[name]
    return Path(str(find_spec(module).origin)).parent / below


def main() -> None:
    """Run the commands and write ``docs/images/<name>.svg``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('names', nargs='*', default=list(RECORDINGS), help=', '.join(RECORDINGS))
    for name in parser.parse_args().names:
        session = []
        for command, shown in RECORDINGS[name]:
            # Without `mmdevplug` at its start, something is wrong with the command on purpose.
            statuses = (0,) if command.startswith('mmdevplug') else (1,)
            session.append((command, keep(run(command, folder_of(name), statuses), shown)))
        (IMAGES / f'{name}.svg').write_text(as_svg(name, session), encoding='utf-8')


if __name__ == '__main__':
    main()
