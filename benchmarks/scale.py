"""What a rank holds and asks as jobs grow, beside torchrun and MMEngine's own runner.

Digits are trained on the CPU with a batch of two. After the second iteration all ranks sleep for
some seconds: what the store's methods are called for then, and what the loopback interface sends,
is what a job costs that computes. Descriptors and memory (PSS) are counted after it. The kinds
take turns; of the seconds to the end of the first iteration the median is printed.

python benchmarks/scale.py [--nproc 2 8 32] [--kinds mmdevplug MMEngine] [--rounds 1]
                           [--json FILE]
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, List

from result_file import write_results
from start_time import DIGITS, ROOT, STOCK, start

KINDS = ('mmdevplug', 'MMEngine')

#: Imported by every rank.
HOOK = """
import collections
import json
import os
import re
import time
from pathlib import Path

import psutil
import torch
from mmengine.hooks import Hook
from mmengine.registry import HOOKS

FOLDER = Path(os.environ['START_TIME_NOTE']).parent
SECONDS = 10
CALLS = collections.Counter()


def count_calls(name):
    called = getattr(torch.distributed.Store, name)

    def counted(self, *args, **kwargs):
        writes = name == 'set' or name == 'add' and args[1]
        CALLS['written' if writes else 'read'] += 1
        return called(self, *args, **kwargs)

    setattr(torch.distributed.Store, name, counted)


for name in ('set', 'get', 'add', 'check', 'multi_get', 'wait'):
    if hasattr(torch.distributed.Store, name):
        count_calls(name)


def sent():
    text = Path('/proc/net/dev').read_text()
    return int(re.search(r'lo:\\s*(.*)', text).group(1).split()[8])


@HOOKS.register_module()
class NoteFirstIteration(Hook):
    priority = 'LOWEST'

    def after_train_iter(self, runner, *args, **kwargs):
        if runner.iter == 0 and runner.rank == 0:
            Path(os.environ['START_TIME_NOTE']).write_text(str(time.time()))
        if runner.iter != 1:
            return
        torch.distributed.barrier()
        before, bytes_before = dict(CALLS), sent()
        time.sleep(SECONDS)
        calls = {kind: CALLS[kind] - before.get(kind, 0) for kind in ('written', 'read')}
        found = dict(calls, sent=sent() - bytes_before, seconds=SECONDS)
        found['descriptors'] = len(os.listdir('/proc/self/fd'))
        found['memory'] = psutil.Process().memory_full_info().pss
        torch.distributed.barrier()
        (FOLDER / f'rank{runner.rank}').write_text(json.dumps(found))
"""
CONFIG = """
_base_ = [{base!r}]
custom_imports = dict(
    imports=['mmdevplug.examples.digits', 'note_first_iteration'], allow_failed_imports=False)
custom_hooks = [dict(type='NoteFirstIteration')]
train_cfg = dict(_delete_=True, by_epoch=True, max_epochs=1)
train_dataloader = dict(batch_size=2, num_workers=0, persistent_workers=False)
param_scheduler = None
val_dataloader = val_cfg = val_evaluator = None
default_hooks = dict(checkpoint=None)
work_dir = {work_dir!r}
"""


def measure(ranks: int, rounds: int, kinds: List[str]) -> List[Dict[str, Any]]:
    """Run both kinds of job in turns, and give a row of figures for each."""
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
        ours += ['--nproc', str(ranks), '--oversubscribe']
        commands = {'mmdevplug': ours, 'MMEngine': torchrun}
        first: Dict[str, List[float]] = {kind: [] for kind in kinds}
        counted: Dict[str, List[Dict[str, Any]]] = {}
        for _ in range(rounds):
            for kind in kinds:
                began = time.time()
                start(commands[kind], folder, ROOT, weigh=False)
                first[kind].append(float((folder / 'note').read_text()) - began)
                notes = [folder / f'rank{rank}' for rank in range(ranks)]
                counted[kind] = [json.loads(note.read_text()) for note in notes]
        return [summarize(kind, ranks, seconds, counted[kind]) for kind, seconds in first.items()]


def summarize(
    kind: str, ranks: int, seconds: List[float], counted: List[Dict[str, Any]]
) -> Dict[str, Any]:
    """Make a row of the figures of all ranks of a job."""
    window = counted[0]['seconds']
    return dict(
        kind=kind,
        nproc=ranks,
        first_iteration=round(statistics.median(seconds), 1),
        descriptors=max(rank['descriptors'] for rank in counted),
        memory_mb=round(statistics.mean(rank['memory'] for rank in counted) / 2**20),
        writes=round(sum(rank['written'] for rank in counted) / window / ranks, 2),
        reads=round(sum(rank['read'] for rank in counted) / window / ranks, 2),
        sent_kb=round(counted[0]['sent'] / window / 1000, 1),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--nproc', type=int, nargs='+', default=[2, 8, 32], metavar='N')
    parser.add_argument('--rounds', type=int, default=1)
    parser.add_argument(
        '--kinds', nargs='+', choices=KINDS, default=KINDS, help='stock ranks take 350 MB each'
    )
    parser.add_argument('--json', help='a file for all figures')
    args = parser.parse_args()
    rows = []
    for ranks in args.nproc:
        for row in measure(ranks, args.rounds, args.kinds):
            rows.append(row)
            print(row, flush=True)
    if args.json:
        write_results(args.json, rows)


if __name__ == '__main__':
    main()
