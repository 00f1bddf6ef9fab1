"""A rank of ``grad_sync.py``: builds a model for each way to average, and times them in turn."""

import json
import os
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple

import torch
from floor import Probes, slowest
from mmengine.model import MMDistributedDataParallel
from torch import distributed as torch_dist, nn
from torch.nn.parallel import DistributedDataParallel

from mmdevplug import DeviceDistributedDataParallel, init_device
from mmdevplug.accelerators import CPUAccelerator

STANDINS = Path(__file__).parents[1] / 'standins'
CARDS = STANDINS / 'fakecard'
#: The name that the stand-in for an eager card gets.
CARD = 'zeta'


class Unprepared(NamedTuple):
    """What the ways need of a rank that ``init_device`` has not prepared."""

    accelerator: Any
    device: torch.device


def start_unprepared() -> Unprepared:
    """A process group on the CPU, as a training script without mmdevplug makes it."""
    torch_dist.init_process_group('gloo')
    return Unprepared(CPUAccelerator(), torch.device('cpu'))


def start_device(name: str) -> Any:
    """The process group and this rank's device.

    ``'card'`` is the stand-in that gloo serves, ``'native'`` the one with a backend of its own.
    """
    if name == 'native':
        sys.path[:0] = [str(STANDINS / 'native' / CARD), str(STANDINS / 'native'), str(CARDS)]
        import_module(f'torch_{CARD}')
        return init_device('pytorch', CARD)
    if name == 'card':
        sys.path.insert(0, str(CARDS))
        import card

        card.install(CARD, count=int(os.environ['LOCAL_WORLD_SIZE']))
        name = CARD
    return init_device('pytorch', name, forced_backend='gloo')


def options_of_ours(settings: Dict[str, Any]) -> Dict[str, Dict[str, Any]]:
    """For each of our ways what the wrapper is told."""
    ways: Dict[str, Dict[str, Any]] = {'ours': {}}
    for compression in settings['compression']:
        if compression != 'none':
            ways[f'ours-{compression}'] = dict(grad_compression=compression)
    return ways


def wrap_stock(build: Callable[[], nn.Module]) -> Dict[str, nn.Module]:
    """What MMEngine's runner and HF accelerate build on the CPU."""
    from accelerate import Accelerator  # measured on the CPU alone
    from accelerate.utils import DistributedDataParallelKwargs

    options = DistributedDataParallelKwargs(broadcast_buffers=False)
    prepare = Accelerator(cpu=True, kwargs_handlers=[options]).prepare
    return {
        'stock': MMDistributedDataParallel(build(), broadcast_buffers=False),
        'accelerate': prepare(build()),
    }


def wrap_all(
    build: Callable[[], nn.Module], context: Any, ours: Dict[str, Dict[str, Any]]
) -> Dict[str, nn.Module]:
    """One model for each way that works on this device, and is not measured by itself."""
    models = {'none': build().to(context.device)}
    if context.accelerator.compilation.lazy:
        models['split'] = build().to(context.device)
    if context.device.type == CARD and context.backend != 'staged':
        models['stock'] = DistributedDataParallel(
            build().to(context.device), device_ids=[context.device], broadcast_buffers=False
        )
    on_card = context.device.type == CARD and context.backend == 'staged'
    naive = average_parameters if on_card else average_buckets
    models['naive'] = naive(build().to(context.device))
    for way, options in ours.items():
        models[way] = DeviceDistributedDataParallel(build(), broadcast_buffers=False, **options)
    return models


def average_buckets(model: nn.Module) -> nn.Module:
    """PyTorch's DDP with a hook that takes each bucket through the host."""

    def average(_, bucket):
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(average_on_host(bucket.buffer()))
        return future

    options = dict(bucket_cap_mb=1, broadcast_buffers=False, init_sync=False)
    wrapped = DistributedDataParallel(model, **options)
    wrapped.register_comm_hook(None, average)
    return wrapped


def average_parameters(model: nn.Module) -> nn.Module:
    """The same by hand, parameter by parameter, for a device that DDP refuses to use with gloo."""

    def average(parameter):
        parameter.grad.copy_(average_on_host(parameter.grad))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(average)
    return model


def average_on_host(gradients: torch.Tensor) -> torch.Tensor:
    host = gradients.cpu()
    torch_dist.all_reduce(host)
    return host.div_(torch_dist.get_world_size()).to(gradients.device)


def difference(models: Dict[str, nn.Module], way: str) -> float:
    """The largest difference between weights trained the naive way and another."""
    pairs = zip(models['naive'].parameters(), models[way].parameters())
    return max((one.cpu() - other.cpu()).abs().max().item() for one, other in pairs)


def work(settings: Dict[str, Any]) -> None:
    """Measure all ways in this rank's process; rank 0 prints the figures."""
    torch.set_num_threads(1)
    context = start_unprepared() if settings['stock'] else start_device(settings['device'])
    accelerator, device = context.accelerator, context.device
    width = settings['width']
    inputs = torch.randn(64, width, device='cpu').to(device)
    message = torch.zeros(1, device='cpu')

    def build() -> nn.Module:
        torch.manual_seed(0)
        layers = [(nn.Linear(width, width), nn.ReLU()) for _ in range(settings['layers'])]
        return nn.Sequential(*[part for layer in layers for part in layer])

    def stepper(way: str, model: nn.Module) -> Callable[[], None]:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

        def step() -> None:
            model(inputs).square().mean().backward()
            if way == 'split':
                accelerator.synchronize(device)
                torch_dist.all_reduce(message)
            optimizer.step()
            optimizer.zero_grad()
            accelerator.compilation.materialize(device)

        return step

    ours = {} if settings['stock'] else options_of_ours(settings)
    models = wrap_stock(build) if settings['stock'] else wrap_all(build, context, ours)
    probes = None if settings['stock'] else Probes(list(models['none'].parameters()), context)
    steppers = {way: stepper(way, model) for way, model in models.items()}
    probe_steps = {} if probes is None else probes.steps()
    times: Dict[str, List[float]] = {name: [] for name in [*steppers, *probe_steps]}
    for number in range(settings['rounds'] + 1):  # the first is for warming up
        for name, step in {**steppers, **probe_steps}.items():
            accelerator.synchronize(device)
            torch_dist.barrier()
            begin = time.perf_counter()
            for _ in range(settings['steps']):
                step()
            accelerator.synchronize(device)
            spent = (time.perf_counter() - begin) / settings['steps'] * 1e3
            if name in probe_steps:
                # What is averaged has to wait for the slowest rank's copies and bytes.
                spent = slowest(spent)
            if number:
                times[name].append(spent)
    found: Dict[str, Any] = dict(times=times)
    if probes is not None:
        probes.close()
        differences = {way: difference(models, way) for way in ours}
        found.update(difference=differences.pop('ours'), compressed_difference=differences)
        found.update(stream_bytes=probes.stream_bytes)
    if torch_dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    torch_dist.barrier()


if __name__ == '__main__':
    work(json.loads(os.environ['GRAD_SYNC_WORKER']))
