"""Saving checkpoints: how long training stands still for one, beside MMEngine's own hook.

    python benchmarks/checkpoint.py --device cpu
    PJRT_DEVICE=CPU python benchmarks/checkpoint.py --device xla

In one process a model trains under the same runner with each hook in turn, several times over:
MMEngine's, ours, and ours with ``async_save=True``. Two figures for each, medians of all saves:

- stall: how long the hook keeps the training loop at an iteration that saves.
- cost: by how much the time from one save to the next is longer than in a run that saves nothing:
  the stall, and what writing in the background takes away from training. It is the difference of
  two long times, so on a noisy machine it is good to some percent of these (``of``).

A checkpoint is as large as the weights and twice that for AdamW's state. The files go to a folder
that is removed afterwards (``--folder``); a plain write and flush of as many bytes is timed in the
same rounds, so that it can be seen what is due to the disk.
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, Dict, List, Tuple

import torch
from mmengine.config import Config
from mmengine.hooks import CheckpointHook
from mmengine.model import BaseModel
from mmengine.registry import DATASETS, HOOKS, MODELS
from mmengine.runner import Runner
from result_file import write_results
from torch import nn
from torch.utils.data import Dataset

from mmdevplug.hooks import SafeCheckpointHook
from mmdevplug.runner import DeviceRunner

WIDTH = 512
WAYS = ('none', 'mmengine', 'ours', 'background')


@MODELS.register_module()
class Stack(BaseModel):
    """Linear layers, of which each image uses all."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, inputs: torch.Tensor, mode: str = 'tensor') -> Any:
        """The mean of the squares of what comes out."""
        for layer in self.layers:
            inputs = layer(inputs).tanh()
        return dict(loss=inputs.square().mean()) if mode == 'loss' else inputs


@DATASETS.register_module()
class Noise(Dataset):
    """The same noise for ever."""

    def __init__(self) -> None:
        self.item = dict(inputs=torch.randn(WIDTH))

    def __getitem__(self, index: int) -> Dict[str, torch.Tensor]:
        return self.item

    def __len__(self) -> int:
        return 1 << 20


class Timed:
    """Mixed into a checkpoint hook: the milliseconds of each call that saved."""

    def after_train_iter(self, runner: Any, *args: Any, **kwargs: Any) -> None:
        """Save, and note how long it took."""
        saves = self.every_n_train_iters(runner, self.interval)  # type: ignore[attr-defined]
        start = time.perf_counter()
        super().after_train_iter(runner, *args, **kwargs)  # type: ignore[misc]
        if saves:
            runner.stalls.append(time.perf_counter() - start)


@HOOKS.register_module()
class Stock(Timed, CheckpointHook):
    """MMEngine's, on whose file no flush waits."""


@HOOKS.register_module()
class Ours(Timed, SafeCheckpointHook):
    """Ours."""


class StockRunner(DeviceRunner):
    """Our runner, for the device, with MMEngine's way to save."""

    save_checkpoint = Runner.save_checkpoint


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--device', choices=('cpu', 'xla', 'cuda'), default='cpu')
    parser.add_argument('--megabytes', type=int, nargs='+', default=[10, 100, 500])
    parser.add_argument('--saves', type=int, default=3, help='that count, in each run')
    parser.add_argument('--rounds', type=int, default=3, help='runs of each kind')
    parser.add_argument('--interval', type=int, default=0, help='iterations; 0: about 1 s')
    parser.add_argument('--folder', help='where to write; a temporary folder by default')
    parser.add_argument('--json', help='write the figures to this file')
    return parser.parse_args()


def run(way: str, args: argparse.Namespace, layers: int, interval: int, folder: str) -> Tuple:
    """Train and save.

    Returns:
        tuple: Seconds of each stall, and of each stretch from one save to the next.
    """
    hooks = dict(
        none=dict(type='Stock', interval=1 << 30, save_last=False),
        mmengine=dict(type='Stock', interval=interval, save_last=False),
        ours=dict(type='Ours', interval=interval, save_last=False),
        background=dict(type='Ours', interval=interval, save_last=False, async_save=True),
    )
    kind = StockRunner if way in ('none', 'mmengine') else DeviceRunner
    saves = 1 + args.saves
    cfg = Config(
        dict(
            accelerator=dict(type=args.device),
            work_dir=folder,
            default_scope='mmengine',
            experiment_name=f'{way}_{layers}_{time.time_ns()}',
            model=dict(type='Stack', layers=layers),
            train_dataloader=dict(
                dataset=dict(type='Noise'),
                batch_size=8,
                num_workers=0,
                sampler=dict(type='InfiniteSampler', shuffle=False),
                collate_fn=dict(type='default_collate'),
            ),
            train_cfg=dict(by_epoch=False, max_iters=(saves + 1) * interval, val_interval=1 << 30),
            optim_wrapper=dict(type='OptimWrapper', optimizer=dict(type='AdamW', lr=1e-4)),
            param_scheduler=[],
            default_hooks=dict(
                checkpoint=dict(hooks[way], by_epoch=False, max_keep_ckpts=1),
                logger=dict(type='LoggerHook', interval=1 << 30),
            ),
            log_level='ERROR',
        )
    )
    runner = kind.from_cfg(cfg)
    runner.stalls = []
    ends: List[float] = []
    train_step = runner.model.train_step

    def step(*step_args: Any, **step_kwargs: Any) -> Any:
        ends.append(time.perf_counter())
        return train_step(*step_args, **step_kwargs)

    runner.model.train_step = step
    runner.train()
    # From the start of an iteration after a save to that of the one after the next save; the
    # first stretch warms up.
    starts = ends[interval::interval]
    stretches = [b - a for a, b in zip(starts, starts[1:])][1:]
    return runner.stalls[1:], stretches


def time_plain_write(size: int, folder: str) -> float:
    """Seconds to write and flush as many bytes."""
    path = Path(folder) / 'plain'
    data = os.urandom(1 << 20)
    start = time.perf_counter()
    with open(path, 'wb') as file:
        for _ in range(size >> 20):
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - start
    path.unlink()
    return seconds


def main() -> None:
    """Measure and print."""
    args = parse_args()
    torch.set_num_threads(1)
    folder = tempfile.mkdtemp(dir=args.folder)
    print(f'device {args.device}, {args.rounds * args.saves} saves each, ms, medians')
    print(f"{'MB':>5}{'':14}{'stall':>9}  stall / MMEngine's{'cost':>9}{'of':>9}")
    try:
        rows = []
        for megabytes in args.megabytes:
            layers = max(1, round(megabytes * 2**20 / 3 / 4 / WIDTH**2))
            rows.append(measure(args, megabytes, layers, folder))
    finally:
        shutil.rmtree(folder)
    if args.json:
        write_results(args.json, rows)


def measure(args: argparse.Namespace, megabytes: int, layers: int, folder: str) -> Dict[str, Any]:
    """Measure one size, print its rows, and return the milliseconds."""
    interval = args.interval
    if not interval:
        _, probe = run('none', argparse.Namespace(**{**vars(args), 'saves': 2}), layers, 8, folder)
        interval = max(8, int(8 / statistics.median(probe)))
    stalls: Dict[str, List[float]] = defaultdict(list)
    stretches: Dict[str, List[float]] = defaultdict(list)
    for _ in range(args.rounds):
        for way in WAYS:
            stalled, stretched = run(way, args, layers, interval, folder)
            stalls[way] += stalled
            stretches[way] += stretched
    free = statistics.median(stretches['none'])
    found: Dict[str, Any] = dict(device=args.device, megabytes=megabytes, stall_ms={}, cost_ms={})
    stock = statistics.median(stalls['mmengine'])
    for way in WAYS[1:]:
        stall, stretch = statistics.median(stalls[way]), statistics.median(stretches[way])
        found['stall_ms'][way], found['cost_ms'][way] = stall * 1e3, (stretch - free) * 1e3
        print(
            f'{megabytes:5} {way:13}{stall * 1e3:9.1f}{stall / stock:20.2f}'
            f'{(stretch - free) * 1e3:9.1f}{free * 1e3:9.0f}',
            flush=True,
        )
    plain = statistics.median(time_plain_write(megabytes << 20, folder) for _ in range(5))
    print(
        f'{megabytes:5} plain write{plain * 1e3:11.1f}   ({interval} iterations a save)',
        flush=True,
    )
    return dict(found, plain_write_ms=plain * 1e3)


if __name__ == '__main__':
    main()
