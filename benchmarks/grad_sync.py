"""Averaging gradients: milliseconds a step of each way to do it, side by side in one run.

    python benchmarks/grad_sync.py --device cpu
    PJRT_DEVICE=CPU python benchmarks/grad_sync.py --device xla

The ways take turns in the same processes, so that a machine that slows down slows all of them. A
figure is the median over the rounds; ratios are what travels between machines.

- none: every rank trains for itself, the floor; on a lazy device in one execution a step.
- split: the same in two executions, cut where averaging has to cut: what is left of the floor when
  gradients must be in hand before the optimizer runs (lazy devices alone).
- stock: ``MMDistributedDataParallel`` as MMEngine's runner builds it, where it works.
- naive: PyTorch's DDP with a communication hook that copies each 1 MB bucket to the host, averages
  it and sends it back, as soon as it is ready.
- ours: ``DeviceDistributedDataParallel`` with its defaults.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from typing import Any, Callable, Dict, List

WAYS = ('none', 'split', 'stock', 'naive', 'ours')


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--device', choices=('cpu', 'xla'), default='cpu')
    parser.add_argument('--ranks', type=int, nargs='+', default=[2, 4])
    parser.add_argument('--layers', type=int, nargs='+', default=None)
    parser.add_argument('--width', type=int, default=None)
    parser.add_argument('--rounds', type=int, default=7)
    parser.add_argument('--steps', type=int, default=5, help='steps in a round')
    parser.add_argument('--json', help='write the figures to this file')
    args = parser.parse_args()
    # Width 1024 and 12 layers are 50 MB of gradients.
    args.width = args.width or {'cpu': 1024, 'xla': 512}[args.device]
    args.layers = args.layers or {'cpu': [8, 12, 32], 'xla': [8, 32]}[args.device]
    return args


def start(args: argparse.Namespace, ranks: int, layers: int) -> Dict[str, Any]:
    """Run one setting in ``ranks`` processes and return rank 0's figures."""
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        port = probe.getsockname()[1]
    settings = json.dumps(dict(vars(args), ranks=ranks, layers=layers))
    workers = []
    for rank in range(ranks):
        env = dict(os.environ, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
        env.update(LOCAL_WORLD_SIZE=str(ranks), MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port))
        env.update(OMP_NUM_THREADS='1', GRAD_SYNC_WORKER=settings)
        if args.device == 'xla':
            env.setdefault('PJRT_DEVICE', 'CPU')
            env.setdefault('CPU_NUM_DEVICES', str(ranks))
        output = subprocess.PIPE if rank == 0 else None
        workers.append(subprocess.Popen([sys.executable, __file__], env=env, stdout=output))
    printed = workers[0].communicate()[0].decode()
    if any(worker.wait() for worker in workers):
        raise SystemExit(f'{ranks} ranks, {layers} layers: a rank failed; see above.')
    return json.loads(printed.splitlines()[-1])


def work(settings: Dict[str, Any]) -> None:
    """Measure all ways in this rank's process."""
    import torch
    from torch import distributed as torch_dist, nn

    from mmdevplug.dist import init_device

    torch.set_num_threads(1)
    context = init_device('pytorch', settings['device'], forced_backend='gloo')
    width = settings['width']
    inputs = torch.randn(64, width, device='cpu').to(context.device)

    def build() -> nn.Module:
        torch.manual_seed(0)
        layers = [(nn.Linear(width, width), nn.ReLU()) for _ in range(settings['layers'])]
        return nn.Sequential(*[part for layer in layers for part in layer])

    def stepper(way: str, model: nn.Module) -> Callable[[], None]:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

        def step() -> None:
            model(inputs).square().mean().backward()
            if way == 'split':
                context.accelerator.materialize(context.device)
            optimizer.step()
            optimizer.zero_grad()
            context.accelerator.materialize(context.device)

        return step

    models = wrap_all(build, context)
    steppers = {way: stepper(way, model) for way, model in models.items()}
    times: Dict[str, List[float]] = {way: [] for way in steppers}
    for number in range(settings['rounds'] + 1):  # the first is for warming up
        for way, step in steppers.items():
            context.accelerator.synchronize(context.device)
            torch_dist.barrier()
            begin = time.perf_counter()
            for _ in range(settings['steps']):
                step()
            context.accelerator.synchronize(context.device)
            if number:
                times[way].append((time.perf_counter() - begin) / settings['steps'] * 1e3)
    agree = difference(models, context)
    if torch_dist.get_rank() == 0:
        print(json.dumps(dict(times=times, difference=agree)), flush=True)
    torch_dist.barrier()


def wrap_all(build: Callable[[], Any], context: Any) -> Dict[str, Any]:
    """One model for each way that works on this device."""
    import torch
    from mmengine.model import MMDistributedDataParallel
    from torch import distributed as torch_dist
    from torch.nn.parallel import DistributedDataParallel

    from mmdevplug import DeviceDistributedDataParallel

    def average_bucket(_, bucket):
        host = bucket.buffer().cpu()
        torch_dist.all_reduce(host)
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(host.div_(torch_dist.get_world_size()).to(context.device))
        return future

    models = {'none': build().to(context.device)}
    if context.accelerator.lazy:
        models['split'] = build().to(context.device)
    if context.device.type == 'cpu':
        models['stock'] = MMDistributedDataParallel(build(), broadcast_buffers=False)
    naive = dict(bucket_cap_mb=1, broadcast_buffers=False, init_sync=False)
    models['naive'] = DistributedDataParallel(build().to(context.device), **naive)
    models['naive'].register_comm_hook(None, average_bucket)
    models['ours'] = DeviceDistributedDataParallel(build(), broadcast_buffers=False)
    return models


def difference(models: Dict[str, Any], context: Any) -> float:
    """The largest difference between weights trained the naive way and ours."""
    pairs = zip(models['naive'].parameters(), models['ours'].parameters())
    return max((one.cpu() - other.cpu()).abs().max().item() for one, other in pairs)


def main() -> None:
    args = parse_args()
    heads = ''.join(f'{way:>10}' for way in WAYS)
    print(f'device {args.device}, width {args.width}, ms a step, median of {args.rounds} rounds')
    print(f'{"ranks":>5}{"layers":>7}{"MB":>6}{heads}{"ours/none":>11}{"ours/split":>11}{"stock/ours":>11}'
          f'{"naive/ours":>11}{"difference":>12}')  # fmt: skip
    results = []
    for ranks in args.ranks:
        for layers in args.layers:
            found = start(args, ranks, layers)
            ms = {way: statistics.median(values) for way, values in found['times'].items()}
            megabytes = layers * (args.width + 1) * args.width * 4 / 2**20
            row = f'{ranks:5}{layers:7}{megabytes:6.0f}'
            row += ''.join(f'{ms[way]:10.1f}' if way in ms else f'{"-":>10}' for way in WAYS)
            row += f'{ms["ours"] / ms["none"]:11.2f}'
            row += f'{ms["ours"] / ms["split"]:11.2f}' if 'split' in ms else f'{"-":>11}'
            row += f'{ms["stock"] / ms["ours"]:11.2f}' if 'stock' in ms else f'{"-":>11}'
            row += f'{ms["naive"] / ms["ours"]:11.2f}{found["difference"]:12.1e}'
            print(row, flush=True)
            results.append(dict(found, ranks=ranks, layers=layers, median_ms=ms))
    if args.json:
        with open(args.json, 'w', encoding='utf-8') as file:
            json.dump(results, file, indent=1)


if __name__ == '__main__':
    worker = os.environ.get('GRAD_SYNC_WORKER')
    if worker:
        work(json.loads(worker))
    else:
        main()
