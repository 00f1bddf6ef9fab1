"""One GPU, or several, or the stand-in of a device with a backend of its own.

With ``-m cuda`` two ranks share a GPU over gloo, or have one each over nccl; a single rank uses
nccl. The rest of that column is where its other kinds of devices are: ``make test-cuda`` runs
features, parity, synchronized batch normalization, mixed precision, resuming, kills, samples,
sampling, model parallel and real models on a GPU, too.
"""

import pytest
import torch
from torch import distributed as torch_dist

import mmdevplug
from tests.columns import CUDA, NATIVE, device_of, gpus, job_of, within
from tests.conformance.card import Asked
from tests.conformance.test_collectives import compare
from tests.features.rows import ROWS, train_rows
from tests.jobs import (
    install_card,
    largest_difference,
    start,
    train_digits,
    train_plain,
    weights_of,
)
from tests.native import needs_native
from tests.ranks import in_ranks, run_ranks

each = pytest.mark.parametrize('accelerator', [pytest.param(NATIVE, marks=needs_native), CUDA])


@pytest.mark.cuda
@pytest.mark.parametrize('ranks', [0, 1, 2])
def test_accuracy(tmp_path, ranks):
    results = run_ranks(train_digits, ranks, 'cuda', tmp_path, **job_of('cuda', ranks))
    for rank, result in enumerate(results):
        assert result['accuracy'] >= 97.0
        assert result['device'] == device_of('cuda', rank, ranks)
        assert not result['staged']


@pytest.mark.cuda
@pytest.mark.parametrize('ranks', [1, 2])
def test_weights_equal_those_of_one_process_on_the_cpu(tmp_path, ranks):
    (expected,) = run_ranks(train_plain, 0, 'cpu', tmp_path / 'cpu')
    job = job_of('cuda', ranks)
    for result in run_ranks(train_plain, ranks, 'cuda', tmp_path / 'cuda', **job):
        assert largest_difference(result['weights'], expected['weights']) <= 1e-4


@pytest.mark.timeout(600)
@pytest.mark.parametrize('accelerator', [pytest.param(NATIVE, marks=pytest.mark.long), CUDA])
def test_features_in_a_single_rank_of_a_group(tmp_path, accelerator):
    names = [name for name, row in ROWS.items() if accelerator not in row.absent_on]
    (expected,) = run_ranks(train_rows, 0, names, 'cpu', tmp_path / 'cpu', True)
    (found,) = run_ranks(
        train_rows, 1, names, accelerator, tmp_path / 'one', timeout=500, **job_of(accelerator, 1)
    )
    for name in names:
        assert 'error' not in found[name], found[name]['error']
        difference = largest_difference(found[name]['weights'], expected[name]['weights'])
        assert difference <= within(accelerator, ROWS[name].tolerance), name


@each
@in_ranks(timeout=200)
def test_first_weights_are_drawn_where_the_config_says(tmp_path, accelerator):
    """By our runner with each choice, and by MMEngine's."""
    from mmengine.registry import MODELS
    from mmengine.runner import Runner

    from mmdevplug.runner import DeviceRunner
    from tests.features.parts import FeatureNet
    from tests.features.rows import row_config

    @MODELS.register_module(force=True)
    class Placed(FeatureNet):
        def init_weights(self):
            self.drawn_on = self.head.weight.device.type
            super().init_weights()

    install_card(accelerator)
    found = {}
    for place in ('auto', 'host', 'device', 'mmengine'):
        cfg = row_config('sgd', accelerator, tmp_path)
        cfg.model = dict(type='Placed')
        cfg.optim_wrapper.optimizer.lr = 0.0
        cfg.experiment_name = place
        cfg.accelerator.initial_weights = 'auto' if place == 'mmengine' else place
        runner = (Runner if place == 'mmengine' else DeviceRunner).from_cfg(cfg)
        runner.train()
        found[place] = runner.model.drawn_on, weights_of(runner.model)
    drawn_on = {name: place for name, (place, _) in found.items()}
    default = accelerator if accelerator == 'cuda' else 'cpu'
    assert drawn_on == dict(auto=default, host='cpu', device=accelerator, mmengine=accelerator)
    assert largest_difference(found['device'][1], found['mmengine'][1]) == 0.0
    like = 'device' if accelerator == 'cuda' else 'host'
    assert largest_difference(found['auto'][1], found[like][1]) == 0.0


def page_locked(accelerator):
    """Train where gradients pass through page-locked memory of the host.

    A GPU stands for an eager device whose tensors gloo does not take.
    """
    import mmdevplug.staged  # noqa: F401
    from mmdevplug import DeviceDistributedDataParallel, init_device
    from mmdevplug.accelerators.torch_native import TorchNativeAccelerator
    from mmdevplug.staged.host_buffers import pins_memory
    from tests.gradients.averaging import batch, net

    install_card(accelerator)
    device = TorchNativeAccelerator(type=accelerator)
    context = init_device('pytorch', device, forced_backend='gloo', timeout=60)
    wrapper = DeviceDistributedDataParallel(
        net(64),
        accelerator=device,
        broadcast_buffers=False,
        bucket_cap_mb=0.01,
        process_group=torch_dist.new_group(backend='staged'),
    )
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        wrapper(batch(step, context.device, 64)).square().mean().backward()
        optimizer.step()
    return dict(
        weights=weights_of(wrapper.module),
        locked=pins_memory(context.device.type),
        device=str(next(wrapper.parameters()).device),
    )


@each
def test_gradients_pass_through_page_locked_memory(accelerator):
    expected = run_ranks(page_locked, 2, 'cpu')
    found = run_ranks(page_locked, 2, accelerator, **job_of(accelerator))
    for rank, (mine, wanted) in enumerate(zip(found, expected)):
        assert mine['device'] == device_of(accelerator, rank)
        assert mine['locked']
        assert largest_difference(mine['weights'], wanted['weights']) <= within(accelerator, 1e-6)


@each
@in_ranks(2)
def test_objects(accelerator):
    """Objects and sums by MMEngine's own functions, and by PyTorch's."""
    from mmengine import dist

    from mmdevplug import patch_mmengine

    start(accelerator)
    patch_mmengine()
    rank, size = torch_dist.get_rank(), torch_dist.get_world_size()
    by_torch = [None] * size
    torch_dist.all_gather_object(by_torch, dict(of=rank))
    assert by_torch == [dict(of=0), dict(of=1)]
    sent = [dict(of=rank)]
    dist.broadcast_object_list(sent)
    assert sent == [dict(of=0)]
    total = torch.ones(1)
    dist.all_reduce(total)
    assert float(total) == 2.0
    assert dist.all_gather_object(rank) == [0, 1]
    for device in ('cpu', 'gpu'):
        collected = dist.collect_results([rank], size, device=device)
        assert collected == (None if rank else [0, 1])


@pytest.mark.parametrize(
    ('accelerator', 'ranks'),
    [(NATIVE, 2), *(pytest.param('cuda', ranks, marks=pytest.mark.cuda) for ranks in (1, 2))],
)
def test_every_collective(accelerator, ranks):
    shared = accelerator == 'cuda' and ranks > gpus()
    asked = Asked(accelerator, mmdevplug.base_config('cuda_gloo') if shared else None)
    assert asked.run(compare, ranks=ranks, **job_of(accelerator, ranks)) == [[]] * ranks


@each
@in_ranks()
def test_inferencers(accelerator):
    """What an inferencer predicts on a device, and the same model on the host."""
    from mmengine.model import revert_sync_batchnorm

    from docs.sites.parts import SiteInferencer, SiteNet
    from mmdevplug import patch_mmengine

    install_card(accelerator)
    patch_mmengine(accelerator)
    torch.manual_seed(0)
    on_host = revert_sync_batchnorm(SiteNet()).eval()
    cfg = dict(model=dict(type='SiteNet'), test_dataloader=dict(collate_fn='default_collate'))
    inferencer = SiteInferencer(cfg, show_progress=False)
    inferencer.model.load_state_dict(on_host.state_dict())
    inputs = list(torch.linspace(-1, 1, 24).reshape(4, 6))
    scores = torch.tensor(inferencer(inputs, batch_size=4)['predictions'])
    with torch.no_grad():
        expected = on_host(torch.stack(inputs))
    assert str(next(inferencer.model.parameters()).device) == f'{accelerator}:0'
    assert (scores - expected).abs().max() <= within(accelerator, 1e-6)
