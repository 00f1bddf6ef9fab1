"""Resume each schedule with each optimizer, and write down what differs.

python -m docs.resume.measure FOLDER [OPTIMIZER ...]

Writes FOLDER/cpu.json, of which docs/resume_table.py makes a page. With names of optimizers only
their columns are measured; others stay as they are.
"""

import json
import platform
import sys
import tempfile
from itertools import product
from pathlib import Path

import torch

from tests.checkpoint.resume_cases import COUNTING, SCHEDULES, optimizers, scheduled
from tests.checkpoint.resuming import differences


def main():
    torch.set_num_threads(1)
    path, chosen = Path(sys.argv[1]) / 'cpu.json', sys.argv[2:] or optimizers()
    rows = json.loads(path.read_text())['rows'] if sys.argv[2:] else {}
    for number, (kind, optimizer) in enumerate(product(SCHEDULES, optimizers())):
        if optimizer not in chosen:
            continue
        # Each in one way to count; neighbours in another.
        ways = COUNTING[:1] if kind == 'ReduceOnPlateau' else COUNTING
        counting = ways[(number + number // len(optimizers())) % len(ways)]
        with tempfile.TemporaryDirectory() as folder:
            found = differences(Path(folder), scheduled(kind, optimizer, counting))
        rows.setdefault(kind, {})[optimizer] = dict(counting=counting, differs=found)
        print(f'{kind} {optimizer} {counting}: {found or "exact"}', flush=True)
    result = dict(torch=torch.__version__, python=platform.python_version(), rows=rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + '\n')


if __name__ == '__main__':
    main()
