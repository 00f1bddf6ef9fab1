"""What a start takes, beside MMEngine's own: an epoch of digits, for some numbers of ranks.

``mmdevplug train CONFIG --nproc N`` against torchrun with a script that calls ``Runner.from_cfg``,
in turns: seconds to the end of the first iteration and of the job, CPU seconds of all its
processes (medians), and the most memory that they hold together, shared pages counted once.

python benchmarks/start_time.py [--nproc 1 2 8] [--rounds 5] [--before CHECKOUT] [--json FILE]
"""

import argparse
import contextlib
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional

import psutil
from result_file import write_results

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
        if runner.iter == 0 and runner.rank == 0:
            with open(os.environ['START_TIME_NOTE'], 'w') as file:
                file.write(str(time.time()))
"""
CONFIG = """
_base_ = [{base!r}]
custom_imports = dict(
    imports=['mmdevplug.examples.digits', 'note_first_iteration'], allow_failed_imports=False)
custom_hooks = [dict(type='NoteFirstIteration')]
train_cfg = dict(_delete_=True, by_epoch=True, max_epochs=1)
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


class Figures(NamedTuple):
    """Of one job: seconds, and bytes where they were asked for."""

    first_iteration: float
    end: float
    cpu: float
    memory: int


def start(command: List[str], folder: Path, checkout: Path, weigh: bool) -> Figures:
    """Run a job, and give its figures; ``weigh`` slows it down.

    A rank of a stock job may be aborted as it ends, by gloo's threads: its figures count.
    """
    note = folder / 'note'
    note.unlink(missing_ok=True)
    environ = dict(os.environ, OMP_NUM_THREADS='1', START_TIME_NOTE=str(note))
    environ['PYTHONPATH'] = os.pathsep.join([str(checkout), str(folder)])
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.time()
    with (folder / 'output').open('w') as output:
        job = subprocess.Popen(
            command, env=environ, cwd=folder, stdout=output, stderr=subprocess.STDOUT
        )
        most = 0
        while weigh and job.poll() is None:
            most = max(most, held_by(psutil.Process(job.pid)))
            time.sleep(0.1)
        status = job.wait()
    ended, after = time.time(), resource.getrusage(resource.RUSAGE_CHILDREN)
    if status and not ('stock.py' in command and note.exists()):
        printed = (folder / 'output').read_text()
        raise SystemExit(f'{" ".join(command)} ended with status {status}: {printed}')
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Figures(float(note.read_text()) - began, ended - began, spent, most)


def held_by(job: psutil.Process) -> int:
    """Bytes that a process and its descendants hold, each page by its share (PSS)."""
    held = 0
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in [job, *job.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                held += process.memory_full_info().pss
    return held


def measure(ranks: int, rounds: int, older: Optional[Path]) -> Dict[str, List[Figures]]:
    """Start all kinds in turns; the first round, which fills caches, weighs them alone."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / 'note_first_iteration.py').write_text(HOOK)
        (folder / 'stock.py').write_text(STOCK)
        text = CONFIG.format(base=str(DIGITS), work_dir=str(folder / 'work'))
        (folder / 'job.py').write_text(text)
        python = sys.executable
        torchrun = [python, '-m', 'torch.distributed.run', f'--nproc_per_node={ranks}']
        torchrun += ['--master_port=29511', 'stock.py', 'job.py']
        ours = [python, '-m', 'mmdevplug.cli.main', 'train', 'job.py', '--accelerator', 'cpu']
        ours += ['--nproc', str(ranks), '--oversubscribe'] if ranks > 1 else []
        commands = {'MMEngine': (torchrun, ROOT), 'mmdevplug': (ours, ROOT)}
        if older is not None:
            commands['mmdevplug before'] = (ours, older)
        found: Dict[str, List[Figures]] = {kind: [] for kind in commands}
        for number in range(rounds + 1):
            for kind, (command, checkout) in commands.items():
                found[kind].append(start(command, folder, checkout, weigh=number == 0))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--nproc', type=int, nargs='+', default=[1, 2, 8], metavar='N')
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--before', type=Path, help='another checkout, to be measured beside')
    parser.add_argument('--json', help='a file for all figures')
    args = parser.parse_args()
    rows = []
    for ranks in args.nproc:
        found = measure(ranks, args.rounds, args.before)
        for kind, (weighed, *figures) in found.items():
            first, end, cpu, _ = (statistics.median(column) for column in zip(*figures))
            print(
                f'{ranks} ranks, {kind}: first iteration after {first:.2f} s, end after '
                f'{end:.2f} s, {cpu:.2f} CPU s, {weighed.memory / 2**20:.0f} MiB at most'
            )
            row = dict(kind=kind, nproc=ranks, first_iteration=first, end=end, cpu=cpu)
            rows.append(dict(row, memory_mb=weighed.memory / 2**20))
    if args.json:
        write_results(args.json, rows)


if __name__ == '__main__':
    main()
