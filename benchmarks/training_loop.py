"""Training loops side by side: MMEngine's runner and wrapper, and ours with its defaults.

    python benchmarks/training_loop.py [--models segformer retinanet] [--blocks 15] [--json FILE]
    PJRT_DEVICE=CPU CPU_NUM_DEVICES=2 python benchmarks/training_loop.py --device xla \\
        --models segformer [--ranks 1]
    python benchmarks/training_loop.py --device cuda --ranks 0 1 --size 512 --batch 8 --blocks 5 \\
        --length 20 --variants fp32 amp compile amp-compile

SegFormer-B0 of mmseg, RetinaNet (ResNet-50) of mmdet and ResNet-50 of mmpretrain, as their configs
are, on random images. With ``--ranks 0`` there is no process group, and so no nccl.
In every process the runners train the same model; they take turns of a few
iterations, so that a machine that slows down slows all. A figure is the median over the turns.

- mmengine: ``Runner`` with ``MMDistributedDataParallel``.
- ours: ``DeviceRunner`` with its defaults.
- ours-bare: the same without any hook, heartbeat or check that can be left out.

MMEngine has no runner for lazy devices: there, ours are compared with ours-bare.

Where memory lies changes an iteration by several percent from run to run, so what hooks cost is
measured by itself, too: the time in ``call_hook``.
"""

import argparse
import itertools
import json
import math
import os
import statistics
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any, Callable, Dict, List

import torch
from hosts import HostsError, launch_variables, run_ranks
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.registry import DATASETS, init_default_scope
from mmengine.runner import Runner
from mmengine.structures import InstanceData, PixelData
from result_file import write_results
from torch.utils.data import Dataset

#: For each device, what ours are compared with first.
WAYS = dict(
    cpu=('mmengine', 'ours', 'ours-bare'), xla=('ours-bare', 'ours'), cuda=('mmengine', 'ours')
)
CONFIGS = dict(
    segformer=('mmseg', 'segformer/segformer_mit-b0_8xb2-160k_ade20k-512x512.py'),
    retinanet=('mmdet', 'retinanet/retinanet_r50_fpn_1x_coco.py'),
    resnet50=('mmpretrain', 'resnet/resnet50_8xb32_in1k.py'),
)
VARIANTS = ('fp32', 'amp', 'compile', 'amp-compile')
#: What of ours can be left out.
BARE = dict(memory=False, compilations=False, preemption=False)


@DATASETS.register_module()
class RandomImages(Dataset):
    """The same random images for every way, as a pipeline of mmseg or mmdet packs them."""

    metainfo = dict(classes=tuple(map(str, range(80))))

    def __init__(self, repository: str, size: int, count: int = 64) -> None:
        self.repository, self.size, self.count = repository, size, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Dict[str, Any]:
        random = torch.Generator().manual_seed(index)
        size = (self.size, self.size)
        image = torch.randint(0, 256, (3, *size), dtype=torch.uint8, generator=random)
        shapes = dict(img_shape=size, ori_shape=size, pad_shape=size, scale_factor=(1.0, 1.0))
        if self.repository == 'mmseg':
            from mmseg.structures import SegDataSample

            labels = torch.randint(0, 80, (1, *size), generator=random)
            sample = SegDataSample(metainfo=shapes, gt_sem_seg=PixelData(data=labels))
            return dict(inputs=image, data_samples=sample)
        if self.repository == 'mmpretrain':
            from mmpretrain.structures import DataSample

            return dict(inputs=image, data_samples=DataSample().set_gt_label(index % 80))
        from mmdet.structures import DetDataSample
        from mmdet.structures.bbox import HorizontalBoxes

        corners = torch.rand(8, 2, generator=random) * self.size / 2
        sides = torch.rand(8, 2, generator=random) * self.size / 2 + 8
        boxes = HorizontalBoxes(torch.cat([corners, corners + sides], 1).clamp(max=self.size))
        labels = torch.randint(0, 80, (8,), generator=random)
        instances = InstanceData(bboxes=boxes, labels=labels)
        return dict(
            inputs=image,
            data_samples=DetDataSample(
                metainfo=shapes, gt_instances=instances, ignored_instances=instances[:0]
            ),
        )


class Turns(Hook):
    """Let runners in several threads train in turns, and note what each turn took.

    Args:
        ways (list): The names, in order.
        length (int): Iterations in a turn.
        blocks (int): Turns of each; one more comes first, for warming up.
        settle (Callable): Waits until the device has done what it was given.
    """

    def __init__(self, ways: List[str], length: int, blocks: int, settle: Callable) -> None:
        self.ways, self.length, self.blocks = ways, length, blocks
        self.settle = settle
        self.change = threading.Condition()
        self.now = 0
        self.times: Dict[str, List[float]] = {way: [] for way in ways}
        self.hooks: Dict[str, List[float]] = {way: [] for way in ways}

    def wait(self, way: str) -> None:
        """Wait for the turn of a way."""
        with self.change:
            self.change.wait_for(lambda: self.ways[self.now] == way)
        if torch.distributed.is_initialized():
            torch.distributed.barrier()

    def end(self) -> None:
        """Let the next one train."""
        with self.change:
            self.now = (self.now + 1) % len(self.ways)
            self.change.notify_all()

    def train(self, way: str, train: Callable) -> None:
        """Train from the first turn of a way to its last; only one at a time communicates."""
        self.wait(way)
        try:
            train()
        except BaseException:  # the others would wait for this one's turns
            traceback.print_exc()
            os._exit(1)
        self.end()

    def hook(self, way: str) -> Hook:
        return _Turn(self, way)


class _Turn(Hook):
    priority = 'LOWEST'

    def __init__(self, turns: Turns, way: str) -> None:
        self.turns, self.way = turns, way

    def before_train(self, runner: Any) -> None:
        call_hook, self.in_hooks, self.waited = runner.call_hook, 0.0, 0.0

        def timed(*args: Any, **kwargs: Any) -> None:
            begin, waited = time.perf_counter(), self.waited
            call_hook(*args, **kwargs)
            self.in_hooks += time.perf_counter() - begin - (self.waited - waited)

        runner.call_hook = timed
        self.begin = time.perf_counter()

    def after_train_iter(self, runner: Any, batch_idx: int, *_: Any, **__: Any) -> None:
        done = batch_idx + 1
        if done % self.turns.length:
            return
        self.turns.settle()
        end = time.perf_counter()
        if done > self.turns.length:
            self.turns.times[self.way].append((end - self.begin) / self.turns.length * 1e3)
            self.turns.hooks[self.way].append(self.in_hooks / self.turns.length * 1e3)
        self.in_hooks = 0.0
        if done < self.turns.length * (self.turns.blocks + 1):
            self.turns.end()
            self.turns.wait(self.way)
        self.begin = time.perf_counter()
        self.waited += self.begin - end


def config_of(way: str, settings: Dict[str, Any], folder: str) -> Config:
    import importlib

    repository, name = CONFIGS[settings['model']]
    root = Path(importlib.import_module(repository).__file__).parent / '.mim' / 'configs'
    cfg = Config.fromfile(str(root / name))
    cfg.model.backbone.init_cfg = None  # pretrained weights, which a download would bring
    if 'pretrained' in cfg.model:
        cfg.model.pretrained = None
    size = settings['size']
    if repository == 'mmseg':
        cfg.model.data_preprocessor.size = (size, size)
        # SyncBN of PyTorch takes tensors of GPUs alone.
        cfg.model.decode_head.norm_cfg = dict(type='BN')
    cfg.train_dataloader = dict(
        dataset=dict(type='mmengine.RandomImages', repository=repository, size=size),
        batch_size=settings['batch'],
        sampler=dict(type='mmengine.InfiniteSampler', shuffle=False),
        num_workers=0,
        collate_fn=dict(type='mmengine.pseudo_collate'),
    )
    iterations = settings['length'] * (settings['blocks'] + 1)
    cfg.train_cfg = dict(type='IterBasedTrainLoop', max_iters=iterations)
    for key in list(cfg):
        if key.startswith(('val_', 'test_')):
            cfg.pop(key)
    cfg.default_hooks = dict(checkpoint=None)
    cfg.param_scheduler = None
    cfg.optim_wrapper.optimizer.lr = 1e-6  # noise at a usual one ends in infinite gradients
    cfg.randomness = dict(seed=0)
    cfg.work_dir = str(Path(folder) / way)
    cfg.experiment_name = way
    cfg.launcher = 'pytorch' if settings['ranks'] else 'none'
    cfg.env_cfg.dist_cfg.backend = 'nccl' if settings['device'] == 'cuda' else 'gloo'
    cfg.log_level = 'WARNING'
    if 'amp' in settings['variant']:
        cfg.optim_wrapper.type = 'AmpOptimWrapper'
    if 'compile' in settings['variant']:
        cfg.compile = True
    if way == 'mmengine' and settings['device'] != 'cuda':
        # Without device_ids, which MMEngine's runner would add on a machine without cards.
        cfg.model_wrapper_cfg = dict(
            type='MMDistributedDataParallel', broadcast_buffers=False, device_ids=None
        )
    elif way != 'mmengine':
        cfg.accelerator = dict(type=settings['device'], **(BARE if way == 'ours-bare' else {}))
        finite = 'ignore' if way == 'ours-bare' else 'stop'
        cfg.model_wrapper_cfg = dict(
            type='DeviceDistributedDataParallel', broadcast_buffers=False, nonfinite_grads=finite
        )
    return cfg


def settle_of(device: str) -> Callable:
    """What waits until a device has done what it was given."""
    if device == 'cpu':
        return lambda: None
    if device == 'cuda':
        return torch.cuda.synchronize
    import torch_xla.core.xla_model as xm

    return xm.wait_device_ops


def work(settings: Dict[str, Any]) -> None:
    """Train every way in this rank's process; rank 0 prints milliseconds an iteration."""
    from mmdevplug.runner import DeviceRunner

    torch.set_num_threads(1)
    if not settings['ranks']:
        for name in launch_variables(0, 0, 1, None, 0):
            del os.environ[name]
    settle = settle_of(settings['device'])
    turns = Turns(settings['ways'], settings['length'], settings['blocks'], settle)
    with tempfile.TemporaryDirectory() as folder:
        trainings: Dict[str, Callable] = {}
        # Ours makes the process group, which MMEngine's runner finds.
        for way in sorted(settings['ways'], reverse=True):
            cfg = config_of(way, settings, folder)
            init_default_scope(CONFIGS[settings['model']][0])
            runner = (Runner if way == 'mmengine' else DeviceRunner).from_cfg(cfg)
            runner.register_hook(turns.hook(way))
            trainings[way] = runner.train
        # None of them in the main thread, where memory is allocated in another way.
        threads = [
            threading.Thread(target=turns.train, args=(way, train))
            for way, train in trainings.items()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if os.environ.get('RANK', '0') == '0':
        print(json.dumps(dict(times=turns.times, hooks=turns.hooks)), flush=True)
    if settings['ranks']:
        torch.distributed.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        '--models', nargs='+', choices=list(CONFIGS), default=['segformer', 'retinanet']
    )
    parser.add_argument('--variants', nargs='+', choices=VARIANTS, default=['fp32'])
    parser.add_argument('--device', choices=list(WAYS), default='cpu')
    parser.add_argument('--ranks', type=int, nargs='+', default=[2], help='0: no process group')
    parser.add_argument('--size', type=int, default=128, help='height and width of images')
    parser.add_argument('--batch', type=int, default=2)
    parser.add_argument('--length', type=int, default=3, help='iterations in a turn')
    parser.add_argument('--blocks', type=int, default=15, help='turns of each')
    parser.add_argument('--json', help='write the figures to this file')
    args = parser.parse_args()
    rows, ways = [], WAYS[args.device]
    print(
        'ms an iteration, then ms in hooks, how much more hooks of ours are, of an iteration, and '
        'ours / the first'
    )
    head = f'{"model":<12}{"variant":<12}{"ranks":>6}' + ''.join(f'{way:>12}' for way in 2 * ways)
    print(f'{head}{"more":>12}{"ratio":>8}')
    for model, variant, ranks in itertools.product(args.models, args.variants, args.ranks):
        here = list(ways)
        if args.device == 'cpu' and 'amp' in variant:
            here.remove('mmengine')  # its mixed precision asks for a card
        settings = dict(vars(args), model=model, variant=variant, ranks=ranks, ways=here)
        environ = dict(TRAINING_LOOP=json.dumps(settings), PYTHONWARNINGS='ignore')
        try:
            printed = run_ranks([sys.executable, __file__], max(ranks, 1), environ=environ)[0]
        except HostsError as error:  # the other figures count all the same
            print(f'{model:<12}{variant:<12}{ranks:>6}  failed: {error}', flush=True)
            rows.append(dict(model=model, variant=variant, ranks=ranks, error=str(error)))
            continue
        found = json.loads(printed.splitlines()[-1])
        ms, hooks = (
            {way: statistics.median(found[kind][way]) for way in here}
            for kind in ('times', 'hooks')
        )
        row = ''.join(f'{ms.get(way, math.nan):12.1f}' for way in ways)
        row += ''.join(f'{hooks.get(way, math.nan):12.2f}' for way in ways)
        share = (hooks['ours'] - hooks[here[0]]) / ms[here[0]]
        ratio = ms['ours'] / ms[here[0]]
        print(f'{model:<12}{variant:<12}{ranks:>6}{row}{share:12.2%}{ratio:8.3f}', flush=True)
        rows.append(
            dict(model=model, variant=variant, ranks=ranks, ms=ms, hooks_ms=hooks, share=share)
        )
    if args.json:
        write_results(args.json, rows)


if __name__ == '__main__':
    work(json.loads(os.environ['TRAINING_LOOP'])) if 'TRAINING_LOOP' in os.environ else main()
