"""What MMEngine does by itself, row by row; nothing of the package under test is used here."""

import os
import threading
from functools import partial
from http.server import HTTPServer, SimpleHTTPRequestHandler

import torch
from mmengine.device import get_device
from mmengine.dist import (
    all_gather_object,
    all_reduce,
    broadcast_object_list,
    collect_results,
    get_comm_device,
    init_dist,
)
from mmengine.hooks import EmptyCacheHook, IterTimerHook, ProfilerHook, RuntimeInfoHook
from mmengine.logging import MessageHub
from mmengine.logging.logger import _get_device_id
from mmengine.model import MMSeparateDistributedDataParallel, revert_sync_batchnorm
from mmengine.optim import AmpOptimWrapper
from mmengine.registry import RUNNERS
from mmengine.runner import Runner, autocast, load_checkpoint, set_random_seed
from mmengine.structures import InstanceData
from mmengine.utils.dl_utils import collect_env
from torch import distributed as torch_dist, nn

from docs.sites.devices import Counted, Waits, drawn, executions, rank_device_of
from docs.sites.parts import Nested, SiteInferencer, SiteNet, SiteParts, config
from tests.columns import backend_of


def attempt(function, *args, **kwargs):
    """What a call returned, or the error that it raised."""
    try:
        return function(*args, **kwargs)
    except Exception as error:
        lines = str(error).strip().splitlines() or ['']
        return dict(error=type(error).__name__, message=lines[0])


def facts_of_stock(name, folder, ports):
    """Run everything, first without a process group and then in one.

    Args:
        name (str): The kind of device.
        folder (Path): For files.
        ports (list): One for each process group after the first; those that were used are taken
            out.

    Returns:
        dict: Row → facts.
    """
    device = rank_device_of(name)
    found = {1: get_device(), 2: attempt(_first_group, name)}
    if torch_dist.is_initialized():
        # MMEngine knows the device and its backend.
        found[3] = dict(asked='gloo', backend=torch_dist.get_backend())
        found[5], found[6] = attempt(sums, device), attempt(objects)
        end_group(ports)
    found.update({
        4: dict(mpi=attempt(_mpi), slurm=attempt(_slurm)),
        7: attempt(_runner_alone, folder),
        10: attempt(_location_of_resume, folder),
        11: dict(resumed=attempt(_resume_own, folder), downloaded=download(folder, 'stock')),
        14: _preprocessors(device),
        15: dict(wrapper=attempt(_amp_wrapper), context=attempt(_cast, device)),
        16: _empty_cache(name),
        18: _seeded(device),
        19: _get_device_id(),
        20: _waits(name, folder),
        21: [f'{key}: {value}' for key, value in collect_env().items()],
        22: attempt(_indexed, device),
        23: _profiled(),
        25: attempt(_inferred, name, device),
        26: _losses_read(name, device),
    })  # fmt: skip
    torch_dist.init_process_group(backend_of(name))
    found[8] = attempt(_runner_in_group, folder)
    found[13] = attempt(_separate, device)
    found[24] = attempt(_synchronized, device)
    end_group(ports)
    return found


def end_group(ports):
    """End the process group; the next one uses another port."""
    torch_dist.barrier()
    torch_dist.destroy_process_group()
    os.environ['MASTER_PORT'] = str(ports.pop())


def _first_group(name):
    init_dist('pytorch', backend='gloo')
    current = getattr(torch, name).current_device()
    return dict(backend=torch_dist.get_backend(), device=f'{name}:{current}')


def sums(device):
    """Sums of the ranks, of a tensor of the host and one of the card."""
    on_host, on_card = torch.ones(1), torch.ones(1, device=device)
    all_reduce(on_host)
    all_reduce(on_card)
    return [on_host.item(), on_card.item(), str(on_card.device), str(get_comm_device())]


def objects():
    """What becomes of objects of each rank."""
    rank = torch_dist.get_rank()
    sent = [dict(of=rank)]
    broadcast_object_list(sent)
    collected = collect_results([rank], 2, device='gpu')
    return dict(broadcast=sent, gathered=all_gather_object(rank), collected=collected)


def _mpi():
    os.environ.setdefault('OMPI_COMM_WORLD_LOCAL_RANK', os.environ['LOCAL_RANK'])
    init_dist('mpi', backend='gloo')


def _slurm():
    os.environ.update(SLURM_PROCID=os.environ['RANK'], SLURM_NTASKS='2', SLURM_NODELIST='here')
    try:
        init_dist('slurm', backend='gloo')
    finally:
        for variable in ('SLURM_PROCID', 'SLURM_NTASKS', 'SLURM_NODELIST'):
            del os.environ[variable]


def _stock_config(folder, name, **options):
    options.setdefault('log_level', 'ERROR')
    return config(folder / f'stock_{name}', f'stock_{name}', **options)


def _where(runner):
    return str(next(runner.model.parameters()).device)


def _runner_alone(folder):
    return _where(RUNNERS.build(_stock_config(folder, 'alone')))


class _Location(Exception):
    """Ends a resumption that has said where it loads to."""


class _Asked(Runner):
    def load_checkpoint(self, filename, map_location='cpu', *args, **kwargs):
        raise _Location(map_location)


def _location_of_resume(folder):
    runner = _Asked.from_cfg(_stock_config(folder, 'resume'))
    try:
        runner.resume('any.pth')
    except _Location as told:
        return str(told)


def _preprocessors(device):
    told = {}
    model = Nested()
    model.to(device)
    told['to'] = str(model.child.preprocessor.device)
    told['cuda'] = attempt(Nested().cuda)
    mover = getattr(Nested, device.type, None) if device.type != 'cpu' else None
    if mover is not None:
        model = Nested()
        mover(model, device.index)
        told['parameters'] = str(model.layer.weight.device)
        told['vendor'] = str(model.data_preprocessor.device)
    return told


def _amp_wrapper():
    AmpOptimWrapper(optimizer=torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1))


def _cast(device):
    one = torch.ones(2, 2, device=device)
    with autocast(device_type=device.type):
        return str(nn.functional.linear(one, one).dtype)


def _empty_cache(name):
    if name in ('cpu', 'xla', 'gcu'):
        return None
    counted = Counted(getattr(torch, name), 'empty_cache')
    hook = EmptyCacheHook(before_epoch=True, after_epoch=True, after_iter=True)
    hook.before_train_epoch(None)
    hook.after_train_iter(None, 0)
    hook.after_train_epoch(None)
    return counted.calls


def _seeded(device):
    set_random_seed(11)
    first = drawn(device)
    set_random_seed(11)
    return first == drawn(device)


class _Timed:
    """What IterTimerHook asks of a runner."""

    iter, max_iters = 0, 1

    def __init__(self, folder):
        self.message_hub = MessageHub.get_instance(f'timed_{folder.name}')


def _waits(name, folder):
    waits = Waits(name)
    hook, runner = IterTimerHook(), _Timed(folder)
    hook.before_train(runner)
    hook.before_train_epoch(runner)
    hook.before_train_iter(runner, 0)
    hook.after_train_iter(runner, 0)
    return waits.calls


def _indexed(device):
    data = InstanceData(scores=torch.arange(4.0, device=device))
    mask = torch.tensor([True, False, True, False], device=device)
    return data[mask].scores.tolist()


def _profiled():
    return [activity.name for activity in ProfilerHook(activity_with_cuda=True).activities]


def _inferred(name, device):
    cfg = dict(model=dict(type='SiteNet'), test_dataloader=dict(collate_fn='default_collate'))
    where = next(SiteInferencer(cfg, show_progress=False).model.parameters()).device
    # As it would be for whoever names the device.
    inferencer = SiteInferencer(cfg, device=str(device), show_progress=False)
    inputs = list(torch.linspace(-1, 1, 24).reshape(4, 6))
    inferencer(inputs, batch_size=4)
    before = executions(name)
    inferencer(inputs, batch_size=4)
    return dict(device=str(where), executions=executions(name) - before)


class _Hub:
    """Reads what it is given, as MMEngine's message hub does."""

    @staticmethod
    def update_scalar(name, value):
        return float(value)


class _WithHub:
    message_hub = _Hub()


def _losses_read(name, device):
    # Synchronized layers of PyTorch 1 do nothing on the CPU, trained or not.
    model = revert_sync_batchnorm(SiteNet()).to(device).eval()
    inputs = torch.ones(2, 6).to(device)
    labels = torch.zeros(2, dtype=torch.int64).to(device)
    with torch.no_grad():
        losses = model(inputs, labels, mode='loss')
    before = executions(name)
    RuntimeInfoHook().after_train_iter(_WithHub, 0, outputs=losses)
    return executions(name) - before


def _runner_in_group(folder):
    return _where(RUNNERS.build(_stock_config(folder, 'group', launcher='pytorch')))


def _separate(device):
    wrapped = MMSeparateDistributedDataParallel(SiteParts().to(device))
    return str(next(wrapped.parameters()).device)


def _synchronized(device):
    layer = nn.SyncBatchNorm(2).to(device)
    return layer(torch.randn(3, 2).to(device)).cpu().tolist()


def _resume_own(folder):
    place = folder / f'own_{os.environ["RANK"]}'
    cfg = config(place, f'own_{os.environ["RANK"]}', log_level='ERROR')
    cfg.train_cfg.max_epochs = 1
    RUNNERS.build(cfg).train()
    cfg.experiment_name += '_again'
    cfg.resume = True
    cfg.train_cfg.max_epochs = 2
    runner = RUNNERS.build(cfg)
    runner.train()
    return runner.epoch


class RunsCode:
    """Pickled, it makes a file when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, 'w')


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


def download(folder, who):
    """Load a malicious checkpoint from an HTTP server.

    Returns:
        dict: Whether its code ``ran``, and what loading ``said``.
    """
    rank = os.environ['RANK']
    place = folder / f'served_{who}_{rank}'
    place.mkdir(parents=True)
    ran = place / 'code_ran'
    torch.save(dict(state_dict=RunsCode(str(ran))), place / 'bad.pth')
    handler = partial(_Quiet, directory=str(place))
    server = HTTPServer(('127.0.0.1', 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    torch.hub.set_dir(str(place / 'hub'))
    try:
        address = f'http://127.0.0.1:{server.server_port}/bad.pth'
        said = attempt(load_checkpoint, nn.Linear(2, 2), address)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    return dict(ran=ran.exists(), said=said if isinstance(said, dict) else str(said))
