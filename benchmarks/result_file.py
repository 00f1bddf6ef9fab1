"""Write what a benchmark measured to a JSON file.

It says how its figures came to be: the command, the commit, PyTorch, and the number of cores.
"""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, Sequence

ROOT = Path(__file__).resolve().parents[1]


def write_results(path: str, rows: Sequence[Dict[str, Any]], **others: Any) -> None:
    """Write rows of figures, and where they are from.

    Args:
        path (str): The file.
        rows (sequence of dict): A row for each setting.
        **others: What else the file holds.
    """
    import torch

    script, *arguments = sys.argv
    if '--json' in arguments:  # where the file lies says nothing of what was measured
        place = arguments.index('--json')
        del arguments[place : place + 2]
    command = ['python', os.path.relpath(script, ROOT), *arguments]
    measured = dict(
        command=shlex.join(command),
        commit=current_commit(),
        torch=torch.__version__,
        cores=os.cpu_count(),
        rows=list(rows),
        **others,
    )
    Path(path).write_text(json.dumps(measured, indent=1) + '\n', encoding='utf-8')


def current_commit() -> str:
    """The commit of the checkout; with a + if files other than the docs differ from it."""
    try:
        head = _git('rev-parse', '--short=8', 'HEAD')
        changed = _git('status', '--porcelain', '-uno', '--', '.', ':!docs')
        return head + ('+' if changed else '')
    except (OSError, subprocess.CalledProcessError):
        return 'unknown'


def _git(*arguments: str) -> str:
    done = subprocess.run(['git', *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE)
    return done.stdout.decode().strip()
