"""What MMEngine does with ours, row by row, in the processes that saw it alone before."""

import os
from pathlib import Path

import torch
from mmengine.device import get_device
from mmengine.hooks import Hook, RuntimeInfoHook
from mmengine.model import revert_sync_batchnorm
from mmengine.registry import HOOKS, RUNNERS
from mmengine.runner import LogProcessor, Runner, autocast, load_checkpoint
from mmengine.structures import InstanceData
from torch import distributed as torch_dist

import mmdevplug
from docs.sites.devices import (
    Counted,
    Waits,
    accelerator_config,
    drawn,
    executions,
    rank_device_of,
)
from docs.sites.parts import (
    Nested,
    ScoresSeen,
    SiteInferencer,
    SiteNet,
    SiteParts,
    config,
    optim_wrapper,
)
from docs.sites.stock import attempt, download, end_group, objects, sums
from mmdevplug import init_device
from mmdevplug.accelerators import device_context
from mmdevplug.hooks import DeviceEmptyCacheHook, DeviceProfilerHook
from mmdevplug.model.place_model import place_model
from tests.columns import NATIVE_BACKENDS, backend_of
from tests.ranks import free_port


@HOOKS.register_module()
class Observer(Hook):
    """Notes what was counted in each iteration of training."""

    priority = 'LOWEST'

    def __init__(self, name):
        self.name = name
        self.waits = Waits(name)
        self.by_iteration = []

    def _now(self):
        return dict(waits=self.waits.calls, executions=executions(self.name))

    def before_train_epoch(self, runner):
        self._before = self._now()

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        now = self._now()
        self.by_iteration.append({key: now[key] - self._before[key] for key in now})
        self._before = now


def facts_of_ours(name, folder, ports):
    """Run everything in a job of ours.

    Args:
        name (str): The kind of device.
        folder (Path): For files.
        ports (list): See :func:`docs.sites.stock.facts_of_stock`.

    Returns:
        dict: Row → facts.
    """
    found = {4: dict(mpi=attempt(_launched, 'mpi', name), slurm=attempt(_launched, 'slurm', name))}
    native = name in NATIVE_BACKENDS
    if native:
        found[3] = attempt(_backend_of_config, name)
        end_group(ports)
    # As a user does who wants inference alone: before any runner, and in a single process.
    found[11] = dict(downloaded=_alone(name, folder))
    job = _train(name, folder)
    runner, device = job['runner'], rank_device_of(name)
    context = device_context()
    path = str(folder / 'job' / 'epoch_2.pth')
    found[1] = get_device()
    found[2] = dict(backend=context.backend, device=str(context.device))
    if native:
        found[5], found[6] = attempt(sums, device), attempt(objects)
    found[7] = str(next(runner.model.parameters()).device)
    found[8] = dict(ids=runner.model.device_ids, iterations=runner.iter)
    found[9] = _weights_sent(name, runner)
    found[10], found[11]['resumed'] = _resume(name, folder)
    found[11]['loaded'] = _loaded(path)
    found[13] = attempt(_separate, context)
    found[14] = _preprocessors(context)
    found[15] = attempt(_mixed_precision, runner, device)
    found[16] = job['emptied']
    found[17] = _memory(runner)
    found[18] = _seeded(runner, device)
    found[19] = sorted(path.name for path in (folder / 'job').glob('*/*rank*.log'))
    found[20] = job['by_iteration']
    report = job['log'].split('Runtime environment:')[1].split('-----')[0]
    found[21] = [line.strip() for line in report.splitlines() if line.strip()]
    found[22] = attempt(_indexed, device)
    found[23] = job['profile']
    found[24] = _statistics(runner)
    found[25] = _inference(name, folder, path)
    found[26] = _losses_read(name, runner, device)
    return found


def _backend_of_config(name):
    context = init_device('pytorch', name, backend='gloo')
    return dict(
        backend=torch_dist.get_backend(), device=str(context.device), sums=sums(context.device)
    )


def _launched(launcher, name):
    """A process group by another launcher's variables, in place of torchrun's."""
    rank, names = os.environ['RANK'], ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE')
    saved = {variable: os.environ.pop(variable) for variable in names}
    if launcher == 'mpi':
        for variable in ('RANK', 'LOCAL_RANK'):
            os.environ[f'OMPI_COMM_WORLD_{variable}'] = rank
        for variable in ('SIZE', 'LOCAL_SIZE'):
            os.environ[f'OMPI_COMM_WORLD_{variable}'] = '2'
    else:
        os.environ.update(
            SLURM_JOB_ID='1', SLURM_PROCID=rank, SLURM_LOCALID=rank, SLURM_NTASKS='2',
            SLURM_NODELIST='here', SLURM_NNODES='1', SLURM_NTASKS_PER_NODE='2',
        )  # fmt: skip
    try:
        context = init_device(launcher, name, backend=backend_of(name))
        ports = [free_port()]
        torch_dist.broadcast_object_list(ports)
        torch_dist.barrier()
        torch_dist.destroy_process_group()
    finally:
        for variable in [v for v in os.environ if v.startswith(('OMPI_', 'SLURM_'))]:
            del os.environ[variable]
        os.environ.update(saved)
    os.environ['MASTER_PORT'] = str(ports[0])
    return str(context.device)


def _alone(name, folder):
    # On a card that shows 4 devices to each of two processes without a launcher, both take one.
    mmdevplug.patch_mmengine({k: v for k, v in accelerator_config(name).items() if k != 'backend'})
    return download(folder, 'ours')


def job_config(name, folder, job, **options):
    cfg = config(folder / job, f'{job}', launcher='pytorch', **options)
    cfg.accelerator = accelerator_config(name)
    cfg.runner_type = 'DeviceRunner'
    return cfg


def _train(name, folder):
    emptied = None
    if name not in ('cpu', 'xla', 'gcu'):
        emptied = Counted(getattr(torch, name), 'empty_cache')
    cfg = job_config(name, folder, 'job', sync_bn='auto', log_level='DEBUG')
    cfg.default_hooks = dict(logger=dict(type='LoggerHook', interval=2))
    cfg.custom_hooks = [
        dict(type='Observer', name=name),
        dict(type='EmptyCacheHook', before_epoch=True, after_epoch=True, after_iter=True),
        dict(
            type='ProfilerHook', by_epoch=False, profile_times=2, activity_with_cuda=True,
            json_trace_path=str(folder / f'host_{os.environ["RANK"]}.json'),
        ),
    ]  # fmt: skip
    runner = RUNNERS.build(cfg)
    runner.train()
    observer = _hook(runner, Observer)
    log = next((folder / 'job').glob(f'*/*rank{os.environ["RANK"]}.log')).read_text()
    profiler = _hook(runner, DeviceProfilerHook)
    traces = Path(runner.log_dir, 'device_trace', f'rank{os.environ["RANK"]}').rglob('*.xplane.pb')
    return dict(
        runner=runner,
        log=log,
        by_iteration=observer.by_iteration,
        emptied=None if emptied is None else emptied.calls,
        emptying=type(_hook(runner, DeviceEmptyCacheHook)).__name__,
        profile=dict(
            activities=[activity.name for activity in profiler.activities],
            recorded=getattr(profiler.profiler.profiler, 'use_device', None),
            traces=sum(path.stat().st_size > 0 for path in traces),
            warned='no profiler is known' in log,
        ),
    )


def _hook(runner, kind):
    return next(hook for hook in runner.hooks if isinstance(hook, kind))


def _weights_sent(name, runner):
    """Broadcasts and executions of initializing: MMEngine's method and ours, on one model."""
    counted = Counted(torch_dist, 'broadcast')
    model = runner.model.module
    told = dict(tensors=len(model.state_dict()))
    for who, initialize in (('stock', Runner._init_model_weights), ('ours', None)):
        model._is_init = False
        before = counted.calls, executions(name)
        if initialize is None:
            runner._init_model_weights()
        else:
            initialize(runner)
        device_context().materialize()
        told[who] = dict(
            broadcasts=counted.calls - before[0], executions=executions(name) - before[1]
        )
    torch_dist.broadcast = counted._function
    return told


def _resume(name, folder):
    cfg = job_config(name, folder, 'job', resume=True)
    cfg.experiment_name = 'resumed'
    cfg.train_cfg.max_epochs = 3
    runner = RUNNERS.build(cfg)
    runner.train()
    optimizer = runner.optim_wrapper.optimizer
    tensors = [*runner.model.parameters()]
    tensors += [state['momentum_buffer'] for state in optimizer.state.values()]
    return sorted({str(tensor.device) for tensor in tensors}), runner.epoch


def _loaded(path):
    model = SiteNet()
    return sorted(load_checkpoint(model, path, map_location='cpu'))


def _separate(context):
    cfg = dict(type='MMSeparateDistributedDataParallel')
    wrapped = place_model(SiteParts(), context, cfg)
    return sorted({str(parameter.device) for parameter in wrapped.parameters()})


def _preprocessors(context):
    model = place_model(Nested(), context, dict(type='MMDistributedDataParallel')).module
    data = model.child.preprocessor(dict(inputs=torch.ones(2, 2)))
    return str(data['inputs'].device)


def _mixed_precision(runner, device):
    wrapper = runner.build_optim_wrapper(optim_wrapper('AmpOptimWrapper', dtype='bfloat16'))
    layer, inputs = runner.model.module.head, torch.ones(1, 4, device=device)
    with autocast(dtype=torch.bfloat16):
        by_mmengine = layer(inputs)
    with wrapper.optim_context(runner.model):
        by_wrapper = layer(inputs)
    return [str(by_mmengine.dtype), str(by_wrapper.dtype)]


def _memory(runner):
    """The lines of validation, in which nothing but the log processor can have put a memory."""
    line = runner.log_processor.get_log_after_iter(runner, 0, 'val')[1]
    stock = LogProcessor().get_log_after_iter(runner, 0, 'val')[1]
    return dict(ours='memory: ' in line, stock='memory: ' in stock)


def _seeded(runner, device):
    runner.set_randomness(11)
    first = drawn(device)
    runner.set_randomness(11)
    return first == drawn(device)


def _indexed(device):
    data = InstanceData(
        scores=torch.arange(4.0, device=device), names=['a', 'b', 'c', 'd'],
    )  # fmt: skip
    mask = torch.tensor([True, False, True, False], device=device)
    indices = torch.tensor([3, 1], device=device)
    by_mask, by_index = data[mask], data[indices]
    wrong = attempt(lambda: data[torch.ones(4, device=device)])
    return dict(
        mask=[by_mask.scores.tolist(), by_mask.names],
        indices=[by_index.scores.tolist(), by_index.names],
        device=str(by_mask.scores.device),
        wrong=wrong,
    )


def _statistics(runner):
    layer = runner.model.module.stem[1]
    return dict(mean=layer.running_mean.cpu().tolist(), batches=int(layer.num_batches_tracked))


def _inference(name, folder, path):
    rank = os.environ['RANK']
    cfg = dict(model=dict(type='SiteNet'), test_dataloader=dict(collate_fn='default_collate'))
    inferencer = SiteInferencer(cfg, path, show_progress=False)
    inputs = list(torch.linspace(-1, 1, 24).reshape(4, 6))
    inferencer(inputs, batch_size=4)
    before = executions(name)
    scores = inferencer(inputs, batch_size=4)['predictions']
    told = dict(
        device=str(next(inferencer.model.parameters()).device),
        executions=executions(name) - before,
    )
    on_host = revert_sync_batchnorm(SiteNet()).eval()
    load_checkpoint(on_host, path, map_location='cpu')
    with torch.no_grad():
        expected = on_host(torch.stack(inputs))
    told['difference'] = float((torch.tensor(scores) - expected).abs().max())
    told['tta'] = _views(name, folder, path, rank, on_host)
    return told


@HOOKS.register_module()
class CountsTests(Hook):
    """Notes the executions of each iteration of testing."""

    priority = 'LOWEST'
    by_iteration = None

    def __init__(self, name):
        self.name = name

    def before_test_epoch(self, runner):
        type(self).by_iteration = []
        self._before = executions(self.name)

    def after_test_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        now = executions(self.name)
        self.by_iteration.append(now - self._before)
        self._before = now


def _views(name, folder, path, rank, on_host):
    """``mmdevplug test --tta``: the mean of two views, as one process computes it on the host."""
    from mmdevplug.cli.test import main

    cfg = job_config(name, folder, 'tta')
    cfg.test_dataloader, cfg.test_cfg = cfg.val_dataloader, dict()
    cfg.test_evaluator = cfg.val_evaluator
    cfg.tta_model = dict(type='MeanOfViews')
    cfg.tta_pipeline = [dict(type='TwoViews')]
    cfg.custom_hooks = [dict(type='CountsTests', name=name)]
    cfg.experiment_name = 'tta'
    written = folder / f'tta_{rank}.py'
    cfg.dump(str(written))
    main([str(written), path, '--tta', '--launcher', 'pytorch'])
    torch_dist.barrier()
    inputs = torch.stack(
        [one['inputs'] for one in Runner.build_dataloader(cfg.val_dataloader).dataset]
    )
    with torch.no_grad():
        expected = (on_host(inputs) + on_host(inputs.flip(1))) / 2
    seen = None if ScoresSeen.seen is None else torch.tensor(ScoresSeen.seen)
    difference = None if seen is None else float((seen - expected).abs().max())
    return dict(difference=difference, executions=CountsTests.by_iteration)


class _Hub:
    @staticmethod
    def update_scalar(name, value):
        return float(value)


class _WithHub:
    message_hub = _Hub()


def _losses_read(name, runner, device):
    """MMEngine's own hook reads losses, after DeviceHook has run the graph."""
    model = runner.model.module.eval()
    with torch.no_grad():
        losses = model.head(torch.ones(2, 4, device=device))
        outputs = dict(a=losses.mean(), b=losses.square().mean(), c=losses.abs().mean())
    before = executions(name)
    device_context().materialize()
    ran = executions(name)
    RuntimeInfoHook().after_train_iter(_WithHub, 0, outputs=outputs)
    return dict(graph=ran - before, reading=executions(name) - ran)
