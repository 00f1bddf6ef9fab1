"""Record an operation on two devices, without and with the guard: ``python docs/record_guard.py``.

It runs docs/drawings/split_by_hand.py on two devices of torch_xla, on PJRT's CPU, and writes
docs/images/guard.svg.
"""

import re
import signal
import sys
from typing import List, Tuple

from record_terminal import IMAGES, ROOT, as_svg, run_in_terminal
from rich.text import Text

FOLDER = ROOT / 'docs' / 'drawings'
SCRIPT = 'split_by_hand.py'
#: Statuses of what PyTorch/XLA aborts, and of a Python error.
ENDS = {'': -signal.SIGABRT, ' --guard': 1}
#: The first line that is shown, and the last one.
SHOWN = {
    '': re.compile(r'Check failed.*?(?=\n\*\*\*)', re.DOTALL),
    ' --guard': re.compile(r'mmdevplug\.errors\..*', re.DOTALL),
}


def record(option: str) -> Tuple[str, List[Text]]:
    """Run the script with an option; return what is typed, and the lines that matter."""
    words = [sys.executable, '-W', 'ignore', SCRIPT, *option.split()]
    variables = dict(PJRT_DEVICE='CPU', CPU_NUM_DEVICES='2', PYTHONPATH=str(ROOT))
    output = run_in_terminal(words, variables, FOLDER, (ENDS[option],))
    found = SHOWN[option].search(output)
    if found is None:
        raise SystemExit(f'{SCRIPT}{option} printed something else:\n{output}')
    lines = [Text(line) for line in found.group().replace(f'{FOLDER}/', '').splitlines()]
    if ENDS[option] < 0:
        lines.append(Text(f'(ended by {signal.Signals(-ENDS[option]).name})', 'italic'))
    return f'python {SCRIPT}{option}', lines


def main() -> None:
    """Write the picture."""
    svg = as_svg('guard', [record(option) for option in ENDS])
    (IMAGES / 'guard.svg').write_text(svg, encoding='utf-8')


if __name__ == '__main__':
    main()
