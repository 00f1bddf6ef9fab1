"""Time from the command to the first iteration of two ranks, beside MMEngine's own start.

``mmdevplug train CONFIG --nproc 2`` against torchrun with a script that calls ``Runner.from_cfg``,
in turns: seconds to the end of the first iteration, and CPU seconds of all processes of a job that
ends there; medians.

python benchmarks/start_time.py [--rounds 5] [--json FILE]
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Dict, List, Tuple

ROOT = Path(__file__).parents[1]
DIGITS = ROOT / 'configs' / 'digits' / 'digits.py'

#: Imported by every rank.
HOOK = """
import os
import time

from mmengine.hooks import Hook
from mmengine.registry import HOOKS


@HOOKS.register_module()
class NoteFirstIteration(Hook):
    def after_train_iter(self, runner, *args, **kwargs):
        if runner.rank == 0:
            with open(os.environ['START_TIME_NOTE'], 'w') as file:
                file.write(str(time.time()))
"""
CONFIG = """
_base_ = [{base!r}]
custom_imports = dict(
    imports=['mmdevplug.examples.digits', 'note_first_iteration'], allow_failed_imports=False)
custom_hooks = [dict(type='NoteFirstIteration')]
train_cfg = dict(_delete_=True, type='IterBasedTrainLoop', max_iters=1)
param_scheduler = None
val_dataloader = val_cfg = val_evaluator = None
default_hooks = dict(checkpoint=None)
work_dir = {work_dir!r}
"""
STOCK = """
import sys

import torch
from mmengine.config import Config
from mmengine.runner import Runner

torch.cuda.set_device = lambda device: None  # MMEngine calls it on a host without GPUs, too
cfg = Config.fromfile(sys.argv[1])
cfg.env_cfg = dict(dist_cfg=dict(backend='gloo'))
cfg.model_wrapper_cfg = dict(type='MMDistributedDataParallel', device_ids=None)
cfg.launcher = 'pytorch'
Runner.from_cfg(cfg).train()
torch.distributed.destroy_process_group()  # gloo's threads may abort a process that ends
"""


def start(command: List[str], folder: Path) -> Tuple[float, float]:
    """Run a job; give its seconds to the first iteration, and its CPU seconds."""
    note = folder / 'note'
    note.unlink(missing_ok=True)
    environ = dict(os.environ, OMP_NUM_THREADS='1', START_TIME_NOTE=str(note))
    environ['PYTHONPATH'] = os.pathsep.join([str(ROOT), str(folder)])
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.time()
    done = subprocess.run(command, env=environ, cwd=folder, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f'{" ".join(command)} ended with status {done.returncode}: {done.stderr}')
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return float(note.read_text()) - began, spent


def measure(rounds: int) -> Dict[str, List[Tuple[float, float]]]:
    """Start both kinds in turns; the first round, which fills caches, is left out."""
    found: Dict[str, List[Tuple[float, float]]] = {'MMEngine': [], 'mmdevplug': []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / 'note_first_iteration.py').write_text(HOOK)
        (folder / 'stock.py').write_text(STOCK)
        text = CONFIG.format(base=str(DIGITS), work_dir=str(folder / 'work'))
        (folder / 'job.py').write_text(text)
        python = sys.executable
        commands = {
            'MMEngine': [
                *(python, '-m', 'torch.distributed.run', '--nproc_per_node=2'),
                *('--master_port=29511', 'stock.py', 'job.py'),
            ],
            'mmdevplug': [python, '-m', 'mmdevplug.cli.main', 'train', 'job.py', '--nproc', '2'],
        }
        commands['mmdevplug'] += ['--accelerator', 'cpu', '--oversubscribe']
        for number in range(rounds + 1):
            for kind, command in commands.items():
                figures = start(command, folder)
                if number:
                    found[kind].append(figures)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--json', help='a file for all figures')
    args = parser.parse_args()
    found = measure(args.rounds)
    for kind, figures in found.items():
        wall, cpu = (statistics.median(column) for column in zip(*figures))
        print(f'{kind}: first iteration after {wall:.2f} s, {cpu:.2f} CPU s in all')
    pairs = zip(found['mmdevplug'], found['MMEngine'])
    more = statistics.median(ours[0] - theirs[0] for ours, theirs in pairs)
    print(f'mmdevplug starts {-more:.2f} s earlier' if more < 0 else f'{more:.2f} s later')
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1) + '\n')


if __name__ == '__main__':
    main()
