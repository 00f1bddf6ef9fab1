"""Record a training on torch_xla beside one on the CPU: ``python docs/record_training.py``.

It trains the digits example twice with one seed and writes docs/images/train.svg: the log of the
run on torch_xla, and the losses of both. It runs in an environment with torch_xla, on PJRT's CPU.
"""

import json
import os
import re
import tempfile
from pathlib import Path
from typing import Dict, List, Tuple

from record_terminal import COLUMNS, IMAGES, ROOT, as_svg, run, tidy
from rich.text import Text

CONFIG = 'configs/digits/digits.py'
#: What a reader would type; the other options are added for this recording.
COMMAND = f'mmdevplug train {CONFIG} --accelerator xla --nproc 2'
RECORDING = '--cfg-options default_hooks.record.type=run_record.RunRecordHook'
#: Lines that are shown; between them, an ellipsis stands for left-out lines of the log.
SHOWN = re.compile(r"accelerator '|Device map|train\) +\[ ?(1|16)\]\[10/|val\) \[16\].*accuracy")
LEFT_OUT = re.compile(r'Epoch\(')
#: Sizes in the units of the terminal's picture.
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 1336, 330, 90, 76, 44
INK, PALE, CPU, XLA = '#d9d9d9', '#6b7280', '#5b7fb5', '#ffb000'


def train(accelerator: str) -> Tuple[str, List[Dict[str, float]]]:
    """Train on ``accelerator`` and return what was printed, and a row for each iteration."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder, 'record.json')
        os.environ.update(
            PJRT_DEVICE='CPU',
            CPU_NUM_DEVICES='2',
            MMDEVPLUG_RUN_RECORD=str(record),
            PYTHONPATH=os.pathsep.join(
                [str(ROOT / 'docs' / 'drawings'), str(ROOT), os.environ.get('PYTHONPATH', '')]
            ),
        )
        command = COMMAND.replace('--accelerator xla', f'--accelerator {accelerator}')
        output = run(f'{command} {RECORDING}')
        return output, json.loads(record.read_text(encoding='utf-8'))


def cut(output: str) -> List[Text]:
    """Keep the lines of the log that are shown; one that is wrapped goes on below it."""
    kept: List[Text] = []
    left_out = goes_on = False
    for line in (Text.from_ansi(line) for line in output.splitlines()):
        begins = re.match(r'\d+/\d+ \S+ - mmengine', line.plain)
        if SHOWN.search(line.plain):
            if left_out:
                kept.append(Text('  ...'))
            left_out, goes_on = False, True
            kept.append(tidy(line))
        elif begins or not line.plain.strip():
            goes_on = False
            left_out = left_out or LEFT_OUT.search(line.plain) is not None
        elif goes_on:
            kept.append(line)
    return kept


def describe(rows: List[Dict[str, float]]) -> str:
    """Say what iterations execute and compile, once the first ones have compiled."""
    first = 1 + max(number for number, row in enumerate(rows) if row['compilations'])
    counts = sorted({int(row['executions']) for row in rows[first:]})
    each = ' or '.join(str(count) for count in counts)
    return (
        f'iterations {first + 1} to {len(rows)}: {each} graph executions each, '
        f'0 recompilations (counted by torch_xla)'
    )


def draw_losses(on_xla: List[Dict[str, float]], on_cpu: List[Dict[str, float]]) -> str:
    """The SVG elements of both curves, one upon the other."""
    losses = [[row['loss'] for row in rows] for rows in (on_cpu, on_xla)]
    if len(losses[0]) != len(losses[1]):
        raise SystemExit(f'{len(losses[0])} iterations on the CPU, {len(losses[1])} on torch_xla')
    apart = max(abs(ours - theirs) for ours, theirs in zip(*losses))
    top = max(max(loss) for loss in losses)
    wide, high = WIDTH - LEFT - 40, HEIGHT - TOP - BOTTOM

    def text(x: float, y: float, words: str, color: str = INK, anchor: str = 'start') -> str:
        return f'<text x="{x:g}" y="{y:g}" fill="{color}" text-anchor="{anchor}">{words}</text>'

    def place(number: float, loss: float) -> Tuple[float, float]:
        return LEFT + wide * number / len(losses[0]), TOP + high * (1 - loss / top)

    parts = [text(LEFT, 24, describe(on_xla))]
    for value in range(int(top) + 1):
        y = place(0, value)[1]
        parts.append(f'<path d="M{LEFT} {y:.1f}h{wide}" stroke="{PALE}" stroke-width="0.7"/>')
        parts.append(text(LEFT - 12, y + 7, str(value), PALE, 'end'))
    for number in range(0, len(losses[0]) - 12, 25):
        parts.append(text(place(number, 0)[0], HEIGHT - 14, str(number), PALE, 'middle'))
    parts.append(text(LEFT + wide, HEIGHT - 14, 'iteration', PALE, 'end'))
    for loss, color, stroke in zip(losses, (CPU, XLA), (11, 2.5)):
        points = ' '.join('{:.1f},{:.1f}'.format(*place(n + 1, v)) for n, v in enumerate(loss))
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="{stroke}" '
            f'stroke-linejoin="round"/>'
        )
    legend = ((CPU, 11, 'loss on the CPU'), (XLA, 2.5, 'loss on torch_xla, same seed'))
    for number, (color, stroke, words) in enumerate(legend):
        y = TOP + 36 + 30 * number
        parts.append(f'<path d="M640 {y}h60" stroke="{color}" stroke-width="{stroke}"/>')
        parts.append(text(716, y + 7, words))
    parts.append(text(716, TOP + 103, f'they differ by {apart:.1g} at most'))
    return '\n'.join(parts)


def main() -> None:
    """Train twice and write the picture."""
    output, on_xla = train('xla')
    _, on_cpu = train('cpu')
    terminal = as_svg('train', [(COMMAND, cut(output))])
    found = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', terminal)
    if found is None or float(found.group(1)) != WIDTH:
        raise SystemExit(f'a terminal of {COLUMNS} columns was expected to be {WIDTH} wide')
    above = float(found.group(2))
    total = above + HEIGHT + 12
    terminal = terminal.replace('<svg ', f'<svg width="{WIDTH}" height="{above:g}" ', 1)
    picture = (
        f'<svg viewBox="0 0 {WIDTH} {total:g}" xmlns="http://www.w3.org/2000/svg">\n'
        f'<rect width="{WIDTH}" height="{total:g}" rx="8" fill="#0c0c0c"/>\n{terminal}'
        f'<g transform="translate(0 {above + 8:g})" font-family="arial, sans-serif" '
        f'font-size="20">\n{draw_losses(on_xla, on_cpu)}\n</g>\n</svg>\n'
    )
    (IMAGES / 'train.svg').write_text(picture, encoding='utf-8')


if __name__ == '__main__':
    main()
