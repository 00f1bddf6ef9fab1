"""How well the small Llama of the example learns: whole, and with parts of it frozen.

    python benchmarks/llama_lora.py

Trains ``configs/llama_lora/llama_lora.py`` on the CPU three times, and writes the bits that each
needs for a byte of held-out text after each validation.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Dict, List

from result_file import write_results

ROOT = Path(__file__).resolve().parents[1]
#: What is trained, and the options for it.
SETTINGS: Dict[str, List[str]] = dict(
    adapters=['model.lora.modules_to_save=None'],
    ends=['optim_wrapper.paramwise_cfg.custom_keys.lora_.lr_mult=0.0'],
    both=[],
)


def train(options: List[str], iters: int) -> Dict[int, float]:
    """Train with some options; the bits for a byte at each validation, by iteration."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, 'tools/train.py', 'configs/llama_lora/llama_lora.py']
        command += ['--accelerator', 'cpu', '--work-dir', folder]
        length = [f'train_cfg.max_iters={iters}', f'train_cfg.val_interval={iters // 4}']
        command += ['--cfg-options', *length, *options]
        environ = dict(os.environ, OMP_NUM_THREADS='1')
        subprocess.run(command, cwd=ROOT, env=environ, check=True, stdout=subprocess.DEVNULL)
        (path,) = Path(folder).glob('*/vis_data/scalars.json')
        lines = map(json.loads, path.read_text(encoding='utf-8').splitlines())
        return {line['step']: line['bits_per_byte'] for line in lines if 'bits_per_byte' in line}


def main() -> None:
    """Train, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--iters', type=int, default=400)
    parser.add_argument('--json', help='write the figures to this file')
    args = parser.parse_args()
    rows = []
    for name, options in SETTINGS.items():
        rows.append(dict(trained=name, option=' '.join(options), bits=train(options, args.iters)))
        print(rows[-1], flush=True)
    if args.json:
        write_results(args.json, rows)


if __name__ == '__main__':
    main()
