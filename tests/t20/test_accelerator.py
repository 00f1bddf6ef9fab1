"""The accelerator asks the vendor's package for what it offers, on the PyTorch that a T20 runs."""

import pytest
import torch
from torch import nn

from mmdevplug import init_device, patch_mmengine
from mmdevplug.accelerators import T20Accelerator, get_accelerator, probe_device
from mmdevplug.accelerators.backend import resolve_backend
from mmdevplug.accelerators.counting import refuse_missing_devices
from mmdevplug.accelerators.environment_report import describe_devices
from mmdevplug.errors import AcceleratorError, LaunchError
from mmdevplug.patches.mmengine import restore_mmengine

pytestmark = pytest.mark.t20


@pytest.fixture
def accelerator(torch_gcu, card):
    found = get_accelerator('gcu')
    assert type(found) is T20Accelerator
    return found


def test_a_seed_reaches_all_cards(accelerator):
    import t20_card

    accelerator.manual_seed(7)
    accelerator.manual_seed(2**32 + 5)
    assert t20_card.seeds[-2:] == [7, 5]


def test_a_runner_seeds_the_cards(accelerator, tmp_path):
    import t20_card
    from mmengine.registry import RUNNERS

    from tests.jobs import digits_config

    cfg = digits_config('gcu', tmp_path)
    cfg.randomness = dict(seed=1234)
    RUNNERS.build(cfg)
    assert t20_card.seeds[-1] == 1234


def test_memory_is_what_torch_gcu_holds(accelerator):
    device = torch.device('xla:6')
    before = accelerator.memory_allocated(device)
    kept = torch.zeros(1000, device=device)
    assert accelerator.memory_allocated(device) == before + 4 * kept.numel()


def test_compilations_are_those_of_the_report(accelerator, torch_gcu, monkeypatch):
    first = torch.ones(2, device='xla:2') + 1  # With what tests before have left.
    accelerator.compilation.materialize(first.device)
    torch_gcu.clear_graph_caches()
    before = accelerator.compilation.count()
    x = torch.ones(3, 5, device='xla:2') * 3 - 1
    accelerator.compilation.materialize(x.device)
    assert accelerator.compilation.count() == before + 1
    y = torch.ones(3, 5, device='xla:2') * 3 - 1  # The same graph.
    accelerator.compilation.materialize(y.device)
    assert accelerator.compilation.count() == before + 1
    monkeypatch.setattr(torch_gcu, 'metrics_report', lambda: 'nothing of the kind')
    assert accelerator.compilation.count() is None


@pytest.mark.parametrize(('clusters', 'index'), [(None, 3), ('1', 3), ('2', 6)])
def test_clusters_of_a_card(accelerator, monkeypatch, clusters, index):
    if clusters is not None:
        monkeypatch.setenv('LEO_CLUSTER_NUM', clusters)
    assert accelerator.device(3) == torch.device('xla', index)


def test_a_rank_beyond_the_clusters_is_refused(accelerator, monkeypatch):
    monkeypatch.setenv('LEO_CLUSTER_NUM', '2')
    with pytest.raises(AcceleratorError) as raised:
        accelerator.device(4)
    assert 'LOCAL_RANK=4 asks for xla:8' in str(raised.value)
    assert "LEO_CLUSTER_NUM='2'" in str(raised.value)
    assert 'at most 4 processes' in str(raised.value)


def test_every_rank_that_has_a_card_is_counted(accelerator, monkeypatch):
    monkeypatch.setattr(accelerator, 'device_count', lambda: 3)
    monkeypatch.setenv('LEO_CLUSTER_NUM', '2')
    assert accelerator.device(1) == torch.device('xla:2')
    assert 'xla 0,2' in describe_devices(accelerator)
    refuse_missing_devices(accelerator, 2)
    with pytest.raises(AcceleratorError, match='Start at most 2 processes'):
        accelerator.device(2)
    with pytest.raises(LaunchError, match='has 3 gcu device.*Start at most 2 processes'):
        refuse_missing_devices(accelerator, 3)


@pytest.mark.parametrize('clusters', ['0', '-1', 'two', ''])
def test_a_wrong_number_of_clusters_is_refused(accelerator, monkeypatch, clusters):
    monkeypatch.setenv('LEO_CLUSTER_NUM', clusters)
    with pytest.raises(AcceleratorError, match=f'LEO_CLUSTER_NUM={clusters!r}: expected'):
        accelerator.device(0)


def test_a_card_that_narrows_is_named(accelerator, card):
    assert probe_device(accelerator, torch.device('xla:1')) == []
    card.set_narrow(True)
    assert probe_device(accelerator, torch.device('xla:1')) == ['int64', 'float64']
    line = init_device('none', 'gcu').describe()
    assert line.endswith('int64 and float64 values are narrowed to 32 bits there, or refused')


def test_eccl_is_refused_with_the_reason(accelerator):
    with pytest.raises(LaunchError) as raised:
        resolve_backend(accelerator, forced='eccl')
    message = str(raised.value)
    assert "accelerator.backend='eccl'" in message
    assert "part of torch_gcu.distributed, the vendor's fork of torch.distributed" in message
    assert "backend='gloo'" in message


@pytest.mark.parametrize('backend', [None, 'nccl', 'eccl'])
def test_the_base_config_goes_through_the_host(accelerator, backend):
    assert resolve_backend(accelerator, forced='auto', configured=backend) == 'staged'


def test_types_of_its_tensors_have_a_name_while_mmengine_is_patched(accelerator):
    half = torch.ones(2, dtype=torch.float16, device='xla:5')
    restore_mmengine()  # after a runner of another test
    of_pytorch = torch.Tensor.type
    with pytest.raises(RuntimeError, match='Unimplemented backend XLA'):
        half.type()
    for _ in range(2):
        patch_mmengine(accelerator)
        assert half.type() == torch.typename(half) == 'torch.xla.HalfTensor'
        assert 'torch.xla.FloatTensor' in repr(nn.ParameterList([nn.Parameter(half.float())]))
        assert half.type(torch.float64).device == half.device
        assert half.cpu().type() == 'torch.HalfTensor'
    restore_mmengine()
    assert torch.Tensor.type is of_pytorch
    assert 'type' not in vars(torch.Tensor)


def test_a_file_of_another_card_is_read_to_the_host(accelerator, torch_gcu, tmp_path):
    from mmdevplug.checkpoint.reading import read_checkpoint

    weight = torch.arange(6.0).reshape(2, 3)
    path = tmp_path / 'saved_by_torch.pth'
    torch.save(dict(state_dict=dict(weight=weight.to('xla:5')), meta={}), path)
    for current in (5, 2):  # The vendor's rebuild function sends it to the card that is current.
        torch_gcu.set_device(current)
        read = read_checkpoint(str(path), 'cpu')['state_dict']['weight']
        assert read.device == torch.device('cpu')
        assert torch.equal(read, weight)


def test_random_numbers_go_on_where_they_were_saved(accelerator):
    device = torch.device('xla:3')
    accelerator.manual_seed(5)
    torch.rand(4, device=device)
    before = accelerator.save_rng(device)
    accelerator.renew_rng()
    state = accelerator.save_rng(device)
    expected = [torch.rand(4, device=device).cpu() for _ in range(2)]
    torch.rand(4, device=device)
    accelerator.load_rng(state, device)
    assert all(torch.equal(torch.rand(4, device=device).cpu(), one) for one in expected)
    assert not torch.equal(*expected)
    assert accelerator.save_rng(device) == state != before


@pytest.mark.parametrize(('rate', 'with_cp'), [(0.1, True), (0.0, True), (0.1, False)])
def test_dropout_in_a_checkpointed_segment_is_named(torch_gcu, monkeypatch, rate, with_cp):
    from mmdevplug.model import lazy_model, place_model

    said = []
    monkeypatch.setattr(lazy_model, 'log_warning', said.append)
    block = nn.Sequential(nn.Linear(2, 2), nn.Dropout(rate))
    block.with_cp = with_cp
    place_model.place_model(nn.Sequential(block), init_device('none', 'gcu'))
    assert len(said) == (rate > 0 and with_cp)
    if said:
        assert '0.1 and 0 more layers drop elements inside of segments' in said[0]
