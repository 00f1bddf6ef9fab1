"""Detectors, segmentors and their losses on a lazy device: what they execute and compile.

    PJRT_DEVICE=CPU XLA_FLAGS=--xla_backend_optimization_level=0 \\
        python benchmarks/host_losses.py [MODEL ...] [--jobs 2] [--json FILE]

Each model is that of a config of mmdet or mmseg, cut down to a ResNet-18 or the smallest of its
kind. It trains on random images of 64 x 64 with random boxes on the CPU, on torch_xla with
``host_losses='auto'`` and with ``host_losses=False``, each in a process with a limit of time.
Counts and times are those of the iterations from the third on. ``without kernel`` names what
torch_xla lacks and computes on the host in the middle of an iteration: executions of its own.
"""

import argparse
import collections
import concurrent.futures
import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List

import torch
from mmengine.config import Config, ConfigDict
from mmengine.registry import MODELS, DefaultScope
from mmengine.structures import InstanceData, PixelData
from result_file import write_results
from torch import Tensor

SIZE, BATCH = 64, 2
#: Iterations of each way: the loss on the device compiles in each of them.
WAYS = dict(cpu=10, auto=10, device=4)
#: Batches of varying numbers of boxes, which all ways train on.
BOXES = 5
CONFIGS = dict(
    retinanet='retinanet/retinanet_r18_fpn_1x_coco.py',
    fcos='fcos/fcos_r50-caffe_fpn_gn-head_1x_coco.py',
    atss='atss/atss_r50_fpn_1x_coco.py',
    gfl='gfl/gfl_r50_fpn_1x_coco.py',
    rtmdet_tiny='rtmdet/rtmdet_tiny_8xb32-300e_coco.py',
    yolox_tiny='yolox/yolox_tiny_8xb8-300e_coco.py',
    yolov3='yolo/yolov3_mobilenetv2_8xb24-320-300e_coco.py',
    centernet='centernet/centernet_r18_8xb16-crop512-140e_coco.py',
    ssdlite='ssd/ssdlite_mobilenetv2-scratch_8xb24-600e_coco.py',
    detr='detr/detr_r50_8xb2-150e_coco.py',
    deformable_detr='deformable_detr/deformable-detr_r50_16xb2-50e_coco.py',
    mask2former='mask2former/mask2former_r50_8xb2-lsj-50e_coco.py',
    fcn_ohem='fcn/fcn_r18-d8_4xb2-80k_cityscapes-512x1024.py',
    fcn_class_weight='fcn/fcn_r18-d8_4xb2-80k_cityscapes-512x1024.py',
)
CHANNELS = [16, 32, 64, 128]


def config_of(name: str) -> ConfigDict:
    """The config of a small model, without weights to download."""
    package = 'mmseg' if name.startswith('fcn_') else 'mmdet'
    folder = Path(importlib.import_module(package).__file__).parent / '.mim' / 'configs'
    model = Config.fromfile(str(folder / CONFIGS[name])).model
    model.backbone.init_cfg = None
    for key in ('init_cfg', 'pretrained'):
        model.pop(key, None)
    model.data_preprocessor.pop('batch_augments', None)
    if model.backbone.type == 'ResNet':
        model.backbone.update(depth=18, base_channels=16)
        if name == 'centernet':
            model.neck.update(in_channels=128, num_deconv_filters=(32, 32, 16))
            model.bbox_head.update(in_channels=16, feat_channels=16)
        elif 'neck' in model:
            model.neck.in_channels = CHANNELS[-len(model.neck.in_channels) :]
    if 'decoder' in model:
        model.update(num_queries=20)
        model.encoder.num_layers, model.decoder.num_layers = 1, 2
    if name == 'mask2former':
        head = model.panoptic_head
        head.update(in_channels=CHANNELS, num_queries=20)
        head.pixel_decoder.encoder.num_layers = 1
        head.transformer_decoder.num_layers = 2
        model.train_cfg.num_points = 256
    if package == 'mmseg':
        model.data_preprocessor.size = (SIZE, SIZE)
        model.backbone.base_channels = 16
        for head, channels in ((model.decode_head, 128), (model.auxiliary_head, 64)):
            head.update(in_channels=channels, channels=16)
        if name == 'fcn_ohem':
            model.decode_head.sampler = dict(type='OHEMPixelSampler', thresh=0.7, min_kept=500)
        else:
            model.decode_head.loss_decode.class_weight = [0.5 + 0.1 * i for i in range(19)]
    _each_dict(model, _comparable)
    return model


def _each_dict(value: Any, change: Callable[[dict], None]) -> None:
    if isinstance(value, dict):
        change(value)
    for part in value.values() if isinstance(value, dict) else value:
        if isinstance(part, (dict, list, tuple)):
            _each_dict(part, change)


def _comparable(options: dict) -> None:
    """Leave out dropout, whose random numbers differ, and statistics of several ranks."""
    if 'batch_first' in options:  # attention, some of which drops elements by default
        options['dropout'] = 0.0
    for key in options:
        if key in ('dropout', 'ffn_drop', 'attn_drop', 'proj_drop', 'dropout_ratio'):
            options[key] = 0.0
    if options.get('type') == 'SyncBN':
        options['type'] = 'BN'


def batch(number: int, name: str) -> Dict[str, Any]:
    """Two random images with boxes, masks of them, or a map of classes."""
    random = torch.Generator().manual_seed(number)
    shapes = dict(img_shape=(SIZE, SIZE), ori_shape=(SIZE, SIZE), scale_factor=(1.0, 1.0))
    shapes.update(pad_shape=(SIZE, SIZE), batch_input_shape=(SIZE, SIZE))
    inputs: List[Tensor] = []
    samples: List[Any] = []
    for place in range(BATCH):
        inputs.append(torch.randint(0, 256, (3, SIZE, SIZE), dtype=torch.uint8, generator=random))
        if name.startswith('fcn_'):
            from mmseg.structures import SegDataSample

            labels = torch.randint(0, 19, (1, SIZE, SIZE), generator=random)
            if name == 'fcn_ohem':  # class weights of mmseg take no ignored pixels
                labels[0, : 5 * ((number + place) % 4)] = 255
            samples.append(SegDataSample(metainfo=shapes, gt_sem_seg=PixelData(data=labels)))
            continue
        samples.append(_with_boxes(1 + (number * 3 + place) % BOXES, shapes, random, name))
    return dict(inputs=inputs, data_samples=samples)


def _with_boxes(count: int, shapes: Dict[str, Any], random: Any, name: str) -> Any:
    from mmdet.structures import DetDataSample
    from mmdet.structures.mask import BitmapMasks

    corners = torch.rand(count, 2, generator=random) * 30
    boxes = torch.cat([corners, corners + torch.rand(count, 2, generator=random) * 25 + 8], 1)
    instances = InstanceData(bboxes=boxes, labels=torch.randint(0, 80, (count,), generator=random))
    if name == 'mask2former':
        masks = torch.zeros(count, SIZE, SIZE, dtype=torch.uint8)
        for mask, (left, top, right, bottom) in zip(masks, boxes.long().tolist()):
            mask[top:bottom, left:right] = 1
        instances.masks = BitmapMasks(masks.numpy(), SIZE, SIZE)
    return DetDataSample(metainfo=shapes, gt_instances=instances)


class LossTimer:
    """Add up the seconds of the losses of heads: forward, and backward to their inputs."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.seconds = 0.0
        classes = {type(m) for m in model.modules() if hasattr(m, 'loss_by_feat')}
        for kind in classes:
            kind.loss_by_feat = self._timed(kind.loss_by_feat)
        self._depth = 0

    def _timed(self, function: Callable) -> Callable:
        def loss_by_feat(head: Any, *args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            begin = time.perf_counter()
            try:
                losses = function(head, *args, **kwargs)
            finally:
                self._depth -= 1
            if not self._depth:  # the loss of a parent class is called within
                self.seconds += time.perf_counter() - begin
                self._time_backward((args, kwargs), losses)
            return losses

        return loss_by_feat

    def _time_backward(self, inputs: Any, losses: Any) -> None:
        from mmdevplug.utils.pytree import tensors_in

        last: List[float] = []

        def passed(_: Tensor) -> None:
            now = time.perf_counter()
            if last:
                self.seconds += now - last.pop()
            last.append(now)

        for tensor in [*tensors_in(losses), *tensors_in(inputs)]:
            if tensor.requires_grad:
                tensor.register_hook(passed)


def work(name: str, way: str) -> None:
    """Train in this process, and print a line of JSON after each iteration."""
    from mmdevplug import init_device
    from mmdevplug.lazy.predictions import training_step
    from mmdevplug.model.place_model import place_model
    from mmdevplug.optim.device_optim_wrapper import DeviceOptimWrapper

    torch.set_num_threads(1)
    package = 'mmseg' if name.startswith('fcn_') else 'mmdet'
    importlib.import_module(f'{package}.utils').register_all_modules(init_default_scope=False)
    torch.manual_seed(0)
    with DefaultScope.overwrite_default_scope(package):
        model = MODELS.build(config_of(name))
    model.init_weights()
    context = init_device('none', 'cpu' if way == 'cpu' else 'xla')
    model = place_model(model, context, host_losses='auto' if way == 'auto' else False).train()
    timer = LossTimer(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    wrapper = DeviceOptimWrapper(optimizer=optimizer)
    count = collections.Counter if way == 'cpu' else counts
    for number in range(WAYS[way]):
        data = batch(number, name)
        torch.manual_seed(number)  # of points that a loss samples
        timer.seconds, before, begin = 0.0, count(), time.perf_counter()
        with training_step(), DefaultScope.overwrite_default_scope(package):
            losses = model.train_step(data, wrapper)
        context.materialize()
        found = count()
        found.subtract(before)
        ms = (time.perf_counter() - begin) * 1e3
        shown = {key: value.item() for key, value in losses.items() if 'loss' in key}
        row = dict(ms=ms, loss_ms=timer.seconds * 1e3, losses=shown, counts=dict(found))
        print(json.dumps(row), flush=True)


def counts() -> 'collections.Counter[str]':
    """How many graphs were executed and compiled, and each operator without kernel."""
    import torch_xla.core.xla_model as xm
    import torch_xla.debug.metrics as metrics

    xm.wait_device_ops()
    found = {
        name: (metrics.metric_data(metric) or [0])[0]
        for name, metric in dict(executions='ExecuteTime', compilations='CompileTime').items()
    }
    operators = [name for name in metrics.counter_names() if name.startswith('aten::')]
    return collections.Counter(found, **{n: metrics.counter_value(n) for n in operators})


def train(name: str, way: str, limit: float) -> Dict[str, Any]:
    """Train in a process of its own; what it has printed when the time is over, and its error."""
    environ = dict(os.environ, HOST_LOSSES=f'{name} {way}', PYTHONWARNINGS='ignore')
    command = [sys.executable, __file__]
    try:
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=limit)
        output, error = done.stdout, done.stderr.strip().splitlines()[-1:] * (done.returncode != 0)
    except subprocess.TimeoutExpired as expired:
        output, error = (expired.stdout or b'').decode(), [f'stopped after {limit:.0f} s']
    rows = [json.loads(line) for line in output.splitlines() if line.startswith('{"ms"')]
    return dict(rows=rows, error=' '.join(error))


def differences(one: List[Dict[str, Any]], other: List[Dict[str, Any]]) -> List[float]:
    """The largest relative difference of the losses in each iteration."""
    return [
        max(abs(x - b['losses'][key]) / max(abs(x), 1e-3) for key, x in a['losses'].items())
        for a, b in zip(one, other)
    ]


def measure(name: str, limits: Dict[str, float]) -> Dict[str, Any]:
    """The figures of one model."""
    found = {way: train(name, way, limit) for way, limit in limits.items()}
    row: Dict[str, Any] = dict(model=name)
    for way, training in found.items():
        row[way] = dict(
            iterations=len(training['rows']), limit=limits[way], error=training['error']
        )
        late = training['rows'][2:]
        if late:
            row[way].update(
                ms=statistics.median(one['ms'] for one in late),
                loss_ms=statistics.median(one['loss_ms'] for one in late),
                executions=max(one['counts'].get('executions', 0) for one in late),
                compilations=sum(one['counts'].get('compilations', 0) for one in late),
                without_kernel={k: v for k, v in late[-1]['counts'].items() if ':' in k and v},
            )
        if training['rows'] and found['cpu']['rows']:
            row[way]['differences'] = differences(found['cpu']['rows'], training['rows'])
    return row


def show(row: Dict[str, Any]) -> str:
    """A line for each way on the device."""
    lines = []
    for way in [way for way in ('auto', 'device') if way in row]:
        cells = row[way]
        figures = ' '.join(f'{key}={_short(cells[key])}' for key in cells if cells[key])
        lines.append(f'{row["model"]:<18}{way:<8}{figures}')
    return '\n'.join(lines)


def _short(value: Any) -> str:
    if isinstance(value, list):
        return f'{max(value):.2g}'
    return f'{value:.4g}' if isinstance(value, float) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('models', nargs='*', metavar='MODEL', help=', '.join(CONFIGS))
    parser.add_argument('--limit', type=float, default=300.0, help='seconds of each training')
    parser.add_argument(
        '--device-limit', type=float, default=60.0, help='the same, with losses on the device'
    )
    parser.add_argument('--jobs', type=int, default=1, help='models at a time')
    parser.add_argument('--ways', nargs='+', choices=list(WAYS), default=list(WAYS))
    parser.add_argument(
        '--json', help='write the figures to this file, which keeps those of other models'
    )
    args = parser.parse_args()
    unknown = sorted(set(args.models) - set(CONFIGS))
    if unknown:
        parser.error(f'unknown models {unknown}; expected some of {list(CONFIGS)}')
    names = args.models or list(CONFIGS)
    limits = dict.fromkeys(args.ways, args.limit)
    if 'device' in limits:
        limits['device'] = args.device_limit
    rows = []
    if args.json and Path(args.json).exists():
        kept = json.loads(Path(args.json).read_text(encoding='utf-8'))['rows']
        rows = [row for row in kept if row['model'] not in names]
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        for row in pool.map(lambda name: measure(name, limits), names):
            rows.append(row)
            print(show(row), flush=True)
            if args.json:
                write_results(args.json, rows)


if __name__ == '__main__':
    work(*os.environ['HOST_LOSSES'].split()) if 'HOST_LOSSES' in os.environ else main()
