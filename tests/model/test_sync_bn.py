"""Synchronized batch normalization: numerics, conversion, refusals, and trainings."""

import copy
from functools import lru_cache

import pytest
import torch
from torch import distributed as torch_dist, nn

from mmdevplug import DeviceDistributedDataParallel, init_device
from mmdevplug.errors import ModelError
from mmdevplug.model import norm_layers
from mmdevplug.model.norm_layers import SYNC_BN, check_sync_bn, convert_norm_layers
from mmdevplug.model.place_model import place_model
from tests.columns import CUDA, GCU, NATIVE, XLA, job_of, lazy, on_xla
from tests.jobs import PLAIN, largest_difference, start, train_digits
from tests.model.sync_bn_cases import CASES, compare, run_all
from tests.ranks import in_ranks, run_ranks

# The backend of NPU cards adds up no doubles, that of MLU cards does.
JOBS = [('cpu', 2), ('cpu', 3), ('zeta', 2), ('mlu', 3), lazy('lazy', 2)]
JOBS += [pytest.param('cuda', 2, marks=pytest.mark.cuda), on_xla('xla', 2), on_xla('gcu', 2)]
DEVICES = ['cpu', 'zeta', NATIVE, CUDA]


@lru_cache(maxsize=None)
def found(accelerator, ranks):
    return run_ranks(run_all, ranks, accelerator, **job_of(accelerator, ranks))


@pytest.mark.parametrize('name', CASES)
@pytest.mark.parametrize(('accelerator', 'ranks'), JOBS)
def test_ranks_together_compute_what_one_process_does(accelerator, ranks, name):
    compare(name, [result[name] for result in found(accelerator, ranks)], ranks)


# conversion -------------------------------------------------------------------------------------


class Layers(nn.Module):
    """Layers of several kinds, one of them at two places, one frozen and one with a hook."""

    def __init__(self):
        super().__init__()
        self.plain = nn.BatchNorm2d(3, eps=1e-3, momentum=0.3)
        self.part = nn.Sequential(nn.Conv2d(3, 3, 1), nn.SyncBatchNorm(3), nn.BatchNorm2d(3))
        self.again = self.part[1]
        self.untracked = nn.BatchNorm1d(3, affine=False, track_running_stats=False)
        self.group = nn.GroupNorm(1, 3)
        self.part[2].eval()
        self.plain.requires_grad_(False)
        self.calls = []
        self.plain.register_forward_hook(lambda *_: self.calls.append(1))

    def forward(self, inputs):
        outputs = self.part(self.plain(inputs))
        return self.untracked(self.again(outputs).flatten(2))


def convert_all(accelerator):
    context = start(accelerator)
    return {sync_bn: convert(context, sync_bn) for sync_bn in KINDS}


def convert(context, sync_bn):
    model = Layers()
    before = dict(model.state_dict(keep_vars=True))
    flags = {name: part.training for name, part in model.named_modules()}
    converted = convert_norm_layers(model, context.accelerator, context.device, sync_bn)
    after = converted.state_dict(keep_vars=True)
    assert list(after) == list(before)
    assert all(after[name] is value for name, value in before.items())
    assert not converted.plain.weight.requires_grad
    assert converted.part[1].weight.requires_grad
    assert {name: part.training for name, part in converted.named_modules()} == flags
    assert converted.again is converted.part[1]
    assert (converted.plain.eps, converted.plain.momentum) == (1e-3, 0.3)
    copy.deepcopy(converted)  # as MMEngine's EMA does
    # Asking a second time, as the wrapper does, changes nothing.
    kinds = [type(part) for part in converted.modules()]
    convert_norm_layers(converted, context.accelerator, context.device)
    assert [type(part) for part in converted.modules()] == kinds
    converted.to(context.device)(torch.randn(2, 3, 4, 4).to(context.device)).sum().backward()
    assert converted.calls == [1]
    names = {name: type(part).__name__ for name, part in converted.named_modules() if name}
    return names, getattr(converted.part[1], 'layer_name', None)


OURS, ORDINARY = 'DeviceSyncBatchNorm', '_BatchNormXd'
#: What becomes of the ordinary layers, and of the synchronized one.
KINDS = {None: (None, OURS), 'auto': (OURS, OURS), 'per_rank': (None, ORDINARY)}


@lru_cache(maxsize=None)
def converted(accelerator):
    return run_ranks(convert_all, 2, accelerator, **job_of(accelerator))


@pytest.mark.parametrize('sync_bn', KINDS)
@pytest.mark.parametrize('accelerator', DEVICES)
def test_conversion(accelerator, sync_bn):
    ordinary, synchronized = KINDS[sync_bn]
    if accelerator in ('cuda', NATIVE):  # where PyTorch's own layer works
        ordinary, synchronized = (
            name if name != OURS else 'SyncBatchNorm' for name in (ordinary, synchronized)
        )
    for names, layer_name in (found[sync_bn] for found in converted(accelerator)):
        assert names['plain'] == (ordinary or 'BatchNorm2d')
        assert names['part.2'] == (ordinary or 'BatchNorm2d')
        assert names['untracked'] == (ordinary or 'BatchNorm1d')
        assert names['part.1'] == synchronized
        assert names['part.0'] == 'Conv2d'
        assert names['group'] == 'GroupNorm'
        assert layer_name == ('part.1' if synchronized == OURS else None)


@pytest.mark.parametrize('value', ['sync', 'exact', True, 3])
def test_unknown_values_are_refused_with_a_list(value):
    with pytest.raises(ModelError) as raised:
        check_sync_bn(value)
    assert f'sync_bn={value!r}' in str(raised.value)
    assert all(repr(known) in str(raised.value) for known in SYNC_BN)


@pytest.mark.parametrize('sync_bn', [None, 'auto', 'torch', 'mmcv', 'per_rank'])
@in_ranks()
def test_single_process_has_ordinary_layers(sync_bn):
    context = init_device('none', 'cpu')
    with pytest.raises(ModelError, match="sync_bn='sync'"):
        place_model(Layers(), context, sync_bn='sync')
    model = place_model(Layers(), context, sync_bn=sync_bn)
    kinds = [type(model.plain).__name__, type(model.part[1]).__name__]
    assert kinds == ['BatchNorm2d', ORDINARY]


class NormAndActivation(nn.BatchNorm2d):
    def forward(self, inputs):
        return super().forward(inputs).relu()


@in_ranks(2)
def test_layers_that_do_more_than_normalize_are_kept():
    context = start('cpu')
    model = nn.Sequential(NormAndActivation(2), nn.BatchNorm2d(2))
    convert_norm_layers(model, context.accelerator, context.device, 'auto')
    assert [type(layer).__name__ for layer in model] == ['NormAndActivation', OURS]


# what ranks do together --------------------------------------------------------------------------


class OwnForward(nn.SyncBatchNorm):
    """As mmrazor's DynamicSyncBatchNorm."""

    def forward(self, x):
        return super().forward(x[:, :])


@in_ranks(2)
def test_a_synchronized_layer_with_a_forward_of_its_own_is_named():
    context = init_device('pytorch', 'cpu')
    model = nn.ModuleDict(dict(bn=OwnForward(2)))
    with pytest.raises(ModelError, match='bn and 0 more: OwnForward has a forward'):
        convert_norm_layers(model, context.accelerator, context.device)


@pytest.mark.parametrize('accelerator', ['cpu', 'zeta', NATIVE, XLA, GCU])
@in_ranks(2)
def test_one_value_per_channel_is_refused_on_all_ranks(accelerator):
    context = start(accelerator)
    norm_layers.torch_sync_bn_works = lambda *_: False  # ours, also where PyTorch's works
    model = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.SyncBatchNorm(3))).to(context.device)
    convert_norm_layers(model, context.accelerator, context.device)
    inputs = torch.zeros(1 if torch_dist.get_rank() == 1 else 0, 2).to(context.device)
    with pytest.raises(ModelError, match="'1.0'") as refused:
        model(inputs)
    assert 'hold 1 value per channel; expected at least 2' in str(refused.value)


@in_ranks(2)
def test_other_channels_are_refused():
    context = start('cpu')
    model = nn.Sequential(nn.SyncBatchNorm(3))
    convert_norm_layers(model, context.accelerator, context.device)
    with pytest.raises(ModelError, match=r"'0' got an input of shape \(4, 2\).*\(N, 3, \.\.\.\)"):
        model(torch.zeros(4, 2))


@in_ranks(3)
def test_layers_keep_their_process_group():
    context = start('cpu')
    pair, single = torch_dist.new_group([0, 1]), torch_dist.new_group([2])
    rank = torch_dist.get_rank()
    layer = nn.SyncBatchNorm(1, process_group=single if rank == 2 else pair)
    convert_norm_layers(layer, context.accelerator, context.device)
    layer(torch.full((2, 1), float(rank)))
    torch_dist.barrier()  # Rank 0 holds the store, and the groups do not end together.
    # Ranks 0 and 1 hold the values 0, 0, 1, 1; rank 2 holds 2, 2.
    expected = (0.1 * 2, 0.9) if rank == 2 else (0.1 * 0.5, 0.9 + 0.1 / 3)
    assert (layer.running_mean.item(), layer.running_var.item()) == pytest.approx(expected)


WIDTH = 600  # fills the first message of PyTorch's DDP, of 1 MB


class Detour(nn.Module):
    """Normalization between two layers, whose order is another on each rank."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.SyncBatchNorm(WIDTH)
        self.one = nn.Linear(WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs, swapped):
        first, last = (self.other, self.one) if swapped else (self.one, self.other)
        return last(self.norm(first(inputs)))


def take_detours(accelerator):
    context = start(accelerator)
    rank = torch_dist.get_rank()
    wrapper = DeviceDistributedDataParallel(Detour(), bucket_cap_mb=1)
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + rank)
        inputs = torch.randn(6, WIDTH, generator=generator).to(context.device).requires_grad_()
        wrapper(inputs, rank == 1).square().mean().backward()
    return {name: p.grad.cpu().numpy() for name, p in wrapper.module.named_parameters()}


@pytest.mark.parametrize('accelerator', ['cpu', 'zeta'])
def test_statistics_do_not_mix_with_gradients_where_ranks_differ(accelerator):
    first, second = run_ranks(take_detours, 2, accelerator)
    assert largest_difference(first, second) == 0.0
    assert all(0 < abs(gradient).max() < 10 for gradient in first.values())


# trainings --------------------------------------------------------------------------------------


class Net(nn.Sequential):
    def __init__(self, norm):
        torch.manual_seed(0)
        super().__init__(nn.Conv2d(1, 3, 3), norm(3), nn.ReLU(), nn.Conv2d(3, 2, 3), norm(2))


@in_ranks(2)
def test_stock_process_group_with_our_wrapper():
    """Gradients in PyTorch's own process group, as under MMEngine's runner."""
    inputs = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    alone = Net(nn.BatchNorm2d)
    alone(inputs).relu().mean().backward()
    torch_dist.init_process_group('gloo')
    model = DeviceDistributedDataParallel(Net(nn.SyncBatchNorm), accelerator='cpu')
    model(inputs.split(3)[torch_dist.get_rank()]).relu().mean().backward()
    for expected, found in zip(alone.parameters(), model.parameters()):
        assert (found.grad - expected.grad).abs().max() <= 1e-6


def train_normalized(accelerator, work_dir, sync_bn=None):
    """Two epochs of the digits example with batch normalization; the same global batches."""
    options = dict(PLAIN, model__norm=True)
    return train_digits(accelerator, work_dir, sync_bn=sync_bn, **options)


@pytest.fixture(scope='module')
def single_process_weights(tmp_path_factory):
    (result,) = run_ranks(train_normalized, 0, 'cpu', tmp_path_factory.mktemp('single'))
    return result['weights']


@pytest.mark.parametrize('accelerator', [*DEVICES, XLA, GCU])
def test_trains_as_one_process(tmp_path, single_process_weights, accelerator):
    options = job_of(accelerator)
    for result in run_ranks(train_normalized, 2, accelerator, tmp_path, 'auto', **options):
        # The running variance too, of which torch_xla's own layer keeps another kind.
        assert largest_difference(result['weights'], single_process_weights) <= 1e-4


def test_each_rank_by_itself_trains_otherwise(tmp_path, single_process_weights):
    # That the comparison above can fail.
    for result in run_ranks(train_normalized, 2, 'cpu', tmp_path, 'per_rank'):
        assert largest_difference(result['weights'], single_process_weights) > 1e-3


class NaiveSyncBatchNorm1d(nn.BatchNorm1d):
    """As mmdet3d has it: it passes tensors of the device to a collective."""

    def forward(self, input):
        torch.distributed.all_reduce(input.mean(0))
        return super().forward(input)


class SyncBatchNorm(nn.Module):
    """As mmcv has it, for CUDA."""

    def __init__(self, num_features):
        super().__init__()
        layer = nn.BatchNorm1d(num_features)
        self.num_features, self.eps, self.momentum = num_features, layer.eps, layer.momentum
        self.affine = self.track_running_stats = True
        self.weight, self.bias = layer.weight, layer.bias
        for name, value in layer.named_buffers():
            self.register_buffer(name, value)

    def forward(self, input):
        raise AssertionError('only support Half or Float Tensor')


@pytest.mark.parametrize(('accelerator', 'ranks'), [('cpu', 2), ('zeta', 2), lazy('lazy', 2)])
@in_ranks()
def test_layers_of_repositories_are_synchronized(accelerator, ranks):
    context = start(accelerator)
    ours = []
    for layer in (NaiveSyncBatchNorm1d(2), SyncBatchNorm(2), nn.SyncBatchNorm(2)):
        model = convert_norm_layers(nn.Sequential(layer), context.accelerator, context.device)
        batch = torch.arange(8.0).reshape(4, 2) * (1 + torch.distributed.get_rank())
        output = model.to(context.device)(batch.to(context.device))
        ours.append((type(model[0]).__name__, output.detach().cpu()))
    (naive, first), (_, of_mmcv), (torchs, right) = ours
    assert torch.equal(of_mmcv, right)
    assert (naive == torchs) == torch.equal(first, right) == (accelerator == 'lazy')
