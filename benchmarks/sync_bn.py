"""Synchronized batch normalization on lazy devices: what it adds to a training step.

    PJRT_DEVICE=CPU CPU_NUM_DEVICES=2 python benchmarks/sync_bn.py [--json FILE]

ResNet-50 of torchvision and SegFormer-B0 of mmseg train on random images in two ranks, each on a
device of its own. In every process two copies take turns of a few steps: one whose layers
synchronize their statistics, and one whose layers normalize each rank's batch by itself. The
figures are medians over the turns, and the graph executions of one step.
"""

import argparse
import importlib
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List

import torch
from hosts import run_ranks
from result_file import write_results
from torch import nn

MODELS = ('resnet50', 'segformer')
WAYS = dict(exact=nn.SyncBatchNorm, per_rank=nn.BatchNorm2d)
CLASSES = 150


class ResNet(nn.Module):
    """ResNet-50 and its loss."""

    def __init__(self, norm: Callable) -> None:
        super().__init__()
        from torchvision.models import resnet50

        self.network = resnet50(norm_layer=norm, num_classes=CLASSES)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss of images, one label each."""
        return nn.functional.cross_entropy(self.network(images), labels[:, 0, 0])


class SegFormer(nn.Module):
    """SegFormer-B0 and its loss, with the weights it starts with."""

    def __init__(self, norm: Callable) -> None:
        super().__init__()
        from mmengine.config import Config
        from mmseg.registry import MODELS as MMSEG_MODELS
        from mmseg.utils import register_all_modules

        register_all_modules()
        root = Path(importlib.import_module('mmseg').__file__).parent / '.mim' / 'configs'
        name = 'segformer/segformer_mit-b0_8xb2-160k_ade20k-512x512.py'
        cfg = Config.fromfile(str(root / name)).model
        cfg.backbone.init_cfg = cfg.pretrained = None  # pretrained weights would be downloaded
        kind = 'SyncBN' if norm is nn.SyncBatchNorm else 'BN'
        cfg.decode_head.norm_cfg = dict(type=kind, requires_grad=True)
        self.network = MMSEG_MODELS.build(cfg)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss of images, one label each pixel."""
        head = self.network.decode_head
        logits = head(self.network.backbone(images))
        logits = nn.functional.interpolate(logits, size=labels.shape[1:], mode='bilinear')
        return nn.functional.cross_entropy(logits, labels)


class Training:
    """A model, and steps that train it."""

    def __init__(self, way: str, settings: Dict[str, Any], context: Any) -> None:
        from mmdevplug import DeviceDistributedDataParallel

        self.context = context
        build = ResNet if settings['model'] == 'resnet50' else SegFormer
        torch.manual_seed(0)
        self.wrapper = DeviceDistributedDataParallel(build(WAYS[way]))
        self.optimizer = torch.optim.SGD(self.wrapper.parameters(), lr=1e-3)
        size, batch = settings['size'], settings['batch']
        random = torch.Generator().manual_seed(context.env.rank)
        images = torch.randn(batch, 3, size, size, generator=random)
        labels = torch.randint(0, CLASSES, (batch, size, size), generator=random)
        self.images, self.labels = (part.to(context.device) for part in (images, labels))

    def steps(self, count: int) -> float:
        """Milliseconds of a step."""
        torch.distributed.barrier()
        begin = time.perf_counter()
        for _ in range(count):
            self.optimizer.zero_grad()
            self.wrapper(self.images, self.labels).backward()
            self.optimizer.step()
            self.context.accelerator.compilation.materialize(self.context.device)
        self.wait()
        return (time.perf_counter() - begin) / count * 1e3

    def executions(self) -> int:
        """The graph executions of one step."""
        import torch_xla.debug.metrics as metrics

        before = metrics.metric_data('ExecuteTime')[0]
        self.steps(1)
        return metrics.metric_data('ExecuteTime')[0] - before

    def wait(self) -> None:
        """Until the device has done what it was given."""
        import torch_xla.core.xla_model as xm

        xm.wait_device_ops()


def work(settings: Dict[str, Any]) -> None:
    """Train in this rank's process; rank 0 prints the figures."""
    from mmdevplug import init_device

    torch.set_num_threads(1)
    context = init_device('pytorch', 'xla', forced_backend='gloo', timeout=600)
    trainings = {way: Training(way, settings, context) for way in WAYS}
    times: Dict[str, List[float]] = {way: [] for way in WAYS}
    for training in trainings.values():
        training.steps(3)  # compiles
    for _ in range(settings['rounds']):
        for way, training in trainings.items():
            times[way].append(training.steps(settings['length']))
    executions = {way: training.executions() for way, training in trainings.items()}
    if context.env.rank == 0:
        layers = sum(
            isinstance(part, nn.modules.batchnorm._BatchNorm)
            for part in trainings['per_rank'].wrapper.modules()
        )
        print(json.dumps(dict(times=times, executions=executions, layers=layers)), flush=True)
    torch.distributed.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--models', nargs='+', choices=MODELS, default=list(MODELS))
    parser.add_argument('--size', type=int, default=64, help='height and width of images')
    parser.add_argument('--batch', type=int, default=2, help='images of a rank')
    parser.add_argument('--length', type=int, default=5, help='steps in a turn')
    parser.add_argument('--rounds', type=int, default=7)
    parser.add_argument('--json', help='write the figures to this file')
    args = parser.parse_args()
    rows = []
    print(f'{"model":<12}{"layers":>8}{"ms exact":>10}{"per rank":>10}{"executions":>16}')
    for model in args.models:
        environ = dict(SYNC_BN=json.dumps(dict(vars(args), model=model)), PYTHONWARNINGS='ignore')
        printed = run_ranks([sys.executable, __file__], 2, environ=environ)[0]
        found = json.loads(printed.splitlines()[-1])
        ms = {way: statistics.median(times) for way, times in found['times'].items()}
        executions, layers = found['executions'], found['layers']
        counts = f'{executions["exact"]} / {executions["per_rank"]}'
        print(
            f'{model:<12}{layers:>8}{ms["exact"]:10.0f}{ms["per_rank"]:10.0f}{counts:>16}',
            flush=True,
        )
        rows.append(dict(model=model, ms=ms, **found))
    if args.json:
        write_results(args.json, rows)


if __name__ == '__main__':
    work(json.loads(os.environ['SYNC_BN'])) if 'SYNC_BN' in os.environ else main()
