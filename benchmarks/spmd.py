"""An iteration on several chips of torch_xla: one process for all (SPMD), beside one for each.

Each way trains the same global batch, in a job of its own, one after the other. Printed are
milliseconds of an iteration (the median of the later ones), its executions, and the peak of the
host's memory of all processes together. ``one`` is a single chip with its part of the batch, the
floor of all ways.

PJRT_DEVICE=CPU python benchmarks/spmd.py [--chips 2] [--models mlp resnet18] [--iters 16]
                                         [--json FILE]
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
from typing import Any, Dict, List

from result_file import ROOT, write_results

WAYS = ('one', 'ranks', 'spmd', 'spmd, whole weights')
#: Samples of a chip.
BATCH = dict(mlp=32, resnet18=4, resnet50=4)


def build_config(model: str, way: str, chips: int, iters: int, folder: str) -> Any:
    """The config of a job, whose data are random images or vectors."""
    import torch
    from mmengine.config import Config
    from mmengine.model import BaseModel
    from mmengine.registry import DATASETS, MODELS
    from torch import nn

    @MODELS.register_module(force=True)
    class Measured(BaseModel):
        def __init__(self):
            super().__init__()
            if model == 'mlp':  # of 32 MB
                layers = [m for _ in range(8) for m in (nn.Linear(1024, 1024), nn.ReLU())]
                self.net = nn.Sequential(*layers, nn.Linear(1024, 10))
            else:
                import torchvision

                self.net = getattr(torchvision.models, model)(num_classes=10)
                self.net = nn.SyncBatchNorm.convert_sync_batchnorm(self.net)

        def forward(self, inputs, label, mode='tensor'):
            return dict(loss=nn.functional.cross_entropy(self.net(inputs), label))

    @DATASETS.register_module(force=True)
    class MeasuredData(torch.utils.data.Dataset):
        def __len__(self):
            return 4096

        def __getitem__(self, index):
            drawn = torch.Generator().manual_seed(index)
            shape = (1024,) if model == 'mlp' else (3, 64, 64)
            return dict(inputs=torch.randn(shape, generator=drawn), label=index % 10)

    cfg = Config(
        dict(
            model=dict(type='Measured'),
            work_dir=folder,
            train_dataloader=dict(
                batch_size=BATCH[model],
                num_workers=0,
                sampler=dict(type='InfiniteSampler'),
                collate_fn=dict(type='default_collate'),
                dataset=dict(type='MeasuredData'),
            ),
            train_cfg=dict(by_epoch=False, max_iters=iters),
            optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.02, momentum=0.9)),
            default_hooks=dict(checkpoint=None),
            accelerator=dict(type='xla', spmd=way.startswith('spmd')),
            launcher='pytorch' if way == 'ranks' else 'none',
            log_level='WARNING',
        )
    )
    if way == 'spmd, whole weights':
        cfg.sharding = False
    return cfg


def train(model: str, way: str, chips: int, iters: int, folder: str) -> None:
    """Train one job, and write what its first rank measured."""
    from mmengine.hooks import Hook

    from mmdevplug.runner import DeviceRunner

    class Note(Hook):
        priority = 'LOWEST'

        def __init__(self):
            self.ends: List[float] = []
            self.executions: List[int] = []

        def after_train_iter(self, runner, *args, **kwargs):
            import torch_xla.core.xla_model as xm
            from torch_xla.debug import metrics

            xm.wait_device_ops()
            counted = [metrics.metric_data(n) for n in ('ExecuteTime', 'ExecuteReplicatedTime')]
            self.executions.append(sum(data[0] for data in counted if data))
            self.ends.append(time.perf_counter())

    note = Note()
    runner = DeviceRunner.from_cfg(build_config(model, way, chips, iters, folder))
    runner.register_hook(note)
    runner.train()
    times = [(b - a) * 1e3 for a, b in zip(note.ends, note.ends[1:])]
    found = dict(
        ms=statistics.median(times[-(iters - 6) :]),
        executions=note.executions[-1] - note.executions[-2],
        peak=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )
    path = Path(folder) / f'rank{runner.rank}.json'
    path.write_text(json.dumps(found))


def measure(model: str, way: str, chips: int, iters: int) -> Dict[str, Any]:
    """Run a job of one way, and give its figures."""
    with tempfile.TemporaryDirectory() as folder:
        words = [__file__, '--work', model, way, str(chips), str(iters), folder]
        command = [sys.executable, *words]
        if way == 'ranks':
            launch = ['-m', 'torch.distributed.run', f'--nproc_per_node={chips}']
            command = [sys.executable, *launch, '--master_port=29531', *words]
        environ = dict(os.environ, CPU_NUM_DEVICES=str(chips), OMP_NUM_THREADS='1')
        environ['PYTHONPATH'] = os.pathsep.join(filter(None, [str(ROOT), os.getenv('PYTHONPATH')]))
        done = subprocess.run(command, env=environ, capture_output=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr.decode()[-3000:])
        found = [json.loads(path.read_text()) for path in Path(folder).glob('rank*.json')]
    return dict(
        model=model,
        way=way,
        chips=chips,
        ms=round(max(rank['ms'] for rank in found), 1),
        executions=found[0]['executions'],
        peak_mb=round(sum(rank['peak'] for rank in found) / 2**20),
    )


def main() -> None:
    """Parse the command line, measure, print a row for each job."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--chips', type=int, nargs='+', default=[2])
    parser.add_argument('--models', nargs='+', choices=list(BATCH), default=['mlp', 'resnet18'])
    parser.add_argument('--ways', nargs='+', choices=WAYS, default=list(WAYS))
    parser.add_argument('--iters', type=int, default=16)
    parser.add_argument('--json')
    args = parser.parse_args()
    rows = []
    for model in args.models:
        for chips in args.chips:
            for way in args.ways:
                rows.append(measure(model, way, chips, args.iters))
                print(rows[-1], flush=True)
    if args.json:
        write_results(args.json, rows)


if __name__ == '__main__':
    if sys.argv[1:2] == ['--work']:
        name, kind, count, iterations, place = sys.argv[2:]
        train(name, kind, int(count), int(iterations), place)
    else:
        main()
