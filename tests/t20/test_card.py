"""The stand-in behaves as the T20 does where the package touches it."""

import io
import subprocess
import sys

import pytest
import torch
from torch import nn

from tests.t20.conftest import FOLDER

pytestmark = pytest.mark.t20


def executions(card, index=0):
    return card.stats(index)['executions']


def small_net():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * 16, 10),
    )


def train(net, device, step, iterations=3):
    """Train a net for some iterations; return the last loss."""
    torch.manual_seed(3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for _ in range(iterations):
        images, labels = torch.rand(4, 3, 8, 8).to(device), torch.tensor([1, 2, 3, 4]).to(device)
        loss = nn.functional.cross_entropy(net(images), labels)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        step(optimizer, loss)
    return loss.item()


# Devices


def test_eight_cards_and_the_current_one(torch_gcu, card):
    assert torch_gcu.is_available()
    assert torch_gcu.device_count() == 8
    assert torch_gcu.gcu_device() == torch.device('xla:0')
    with torch_gcu.device(3):
        assert torch_gcu.current_device() == 3
        assert torch_gcu.gcu_device() == torch.device('xla:3')
        assert torch.zeros(2, device='xla').device == torch.device('xla:3')
        with torch_gcu.device_of(torch.zeros(1, device='xla:5')):
            assert torch_gcu.current_device() == 5
        with torch_gcu.device_of(torch.zeros(1)):
            assert torch_gcu.current_device() == 3
    assert torch_gcu.current_device() == 0


def test_index_that_does_not_exist(torch_gcu, card):
    torch_gcu.set_device(8)
    assert torch_gcu.current_device() == 0
    for function in (torch_gcu.get_device_name, torch_gcu.sync_lived_tensor):
        with pytest.raises(IndexError, match=r'must in \[0, 7\], got 8'):
            function(8)
    with pytest.raises(IndexError, match='xla:8 does not exist'):
        torch.zeros(1, device='xla:8')
    with pytest.raises(ValueError, match='Expected a gcu device, but got: cpu'):
        torch_gcu.gcu_device('cpu')
    with pytest.raises(ValueError, match='with a specified index or an integer'):
        torch_gcu.set_device('xla')


@pytest.mark.parametrize(('visible', 'count'), [('0', 1), ('2,5,7', 3)])
def test_visible_cards(torch_gcu, visible, count):
    code = 'import torch_gcu; print(torch_gcu.device_count())'
    environment = dict(PYTHONPATH=str(FOLDER), TOPS_VISIBLE_DEVICES=visible, PATH='/usr/bin:/bin')
    result = subprocess.run(
        [sys.executable, '-W', 'ignore', '-c', code],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert int(result.stdout) == count


@pytest.mark.parametrize('other', ['cpu', 'xla:2'])
def test_devices_do_not_mix(torch_gcu, card, other):
    one, two = torch.ones(4, 4, device='xla:1'), torch.ones(4, 4, device=other)
    for operation in (torch.add, torch.mm, lambda a, b: torch.cat([a, b])):
        with pytest.raises(RuntimeError, match='Expected all tensors to be on the same device'):
            operation(one, two)


# Numbers


def test_training_gives_the_numbers_of_the_host(torch_gcu, card):
    torch.manual_seed(0)
    net = small_net()
    initial = {name: value.clone() for name, value in net.state_dict().items()}
    on_host = train(net, 'cpu', lambda optimizer, loss: optimizer.step())
    other = small_net()
    other.load_state_dict(initial)
    other.to('xla:2')
    on_card = train(
        other, 'xla:2', lambda optimizer, loss: torch_gcu.optimizer_step(optimizer, device=2)
    )
    assert on_card == pytest.approx(on_host, rel=1e-5)
    for name, value in net.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name].cpu(), value, rtol=1e-4, atol=1e-6)


def test_views_share_memory(torch_gcu, card):
    whole = torch.zeros(2, 3, device='xla:1')
    whole[0] = 1
    whole[:, 1].add_(4)
    whole.t()[2].fill_(7)
    assert whole.cpu().tolist() == [[1, 5, 7], [0, 4, 7]]
    assert whole.unfold(1, 2, 1).cpu().tolist() == [[[1, 5], [5, 7]], [[0, 4], [4, 7]]]


def test_results_stay_on_their_card(torch_gcu, card):
    x = torch.rand(4, 3, device='xla:5')
    assert torch.cat([x, x]).device == x.device
    assert torch.stack([x, x]).device == x.device
    assert x.topk(2)[1].device == x.device
    assert x[torch.tensor([0, 2], device='xla:5')].device == x.device
    out = torch.empty(0, device='xla:5')
    assert torch.add(x, x, out=out).shape == (4, 3)
    assert out.device == x.device


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_16_bits(torch_gcu, card, dtype):
    x = torch.rand(4, 4, device='xla:0').to(dtype)
    assert (x @ x).dtype == dtype
    assert (x + 1).dtype == dtype
    assert (x * torch.rand(4, 4, device='xla:0')).dtype == torch.float32
    assert nn.functional.softmax(x, -1, dtype=torch.float32).dtype == torch.float32
    assert nn.functional.conv2d(x.view(1, 1, 4, 4), x.view(1, 1, 4, 4)).dtype == dtype


@pytest.mark.parametrize('enabled', [True, False])
def test_narrowing(torch_gcu, card, enabled):
    card.set_narrow(enabled)
    number, ninth = torch.tensor([2**40 + 5]), torch.tensor([1 / 9], dtype=torch.float64)
    there_and_back = number.to('xla:0').cpu(), ninth.to('xla:0').cpu()
    assert [tensor.dtype for tensor in there_and_back] == [torch.int64, torch.float64]
    assert torch.equal(there_and_back[0], number) != enabled
    assert torch.equal(there_and_back[1], ninth) != enabled
    product = torch.full((1,), 2**20, device='xla:0') * 2**20
    assert product.item() == (0 if enabled else 2**40)


@pytest.mark.parametrize('cut', [True, False])
def test_weights_are_lost_without_a_cut(torch_gcu, card, cut):
    card.set_lose_weights(True)
    net = nn.Linear(3, 2).to('xla:0')
    if cut:
        torch_gcu.sync_lived_tensor()
    weights = nn.Linear(3, 2).state_dict()
    net.load_state_dict(weights)
    assert torch.equal(net.weight.cpu(), weights['weight']) == cut


# Laziness


def test_operations_wait_for_an_execution(torch_gcu, card):
    x = torch.ones(3).to('xla:0')
    assert not card.is_pending(x)
    y = (x + 1) * 2
    assert card.is_pending(y)
    assert card.stats(0)['operations'] == 2
    torch_gcu.sync_lived_tensor()
    assert not card.is_pending(y)
    assert card.stats(0)['operations'] == 0
    assert executions(card) == {'sync_lived_tensor': 1}
    y.cpu()
    assert executions(card) == {'sync_lived_tensor': 1}
    torch_gcu.sync_lived_tensor()  # nothing is pending
    assert executions(card) == {'sync_lived_tensor': 1}


@pytest.mark.parametrize(
    ('read', 'reason'),
    [
        (lambda x: x.sum().item(), 'item'),
        (lambda x: float(x[0]), 'item'),
        (lambda x: bool((x > 0).all()), 'item'),
        (lambda x: x.cpu(), 'copy to host'),
        (lambda x: x.tolist(), 'copy to host'),
        (repr, 'copy to host'),
        (lambda x: torch.zeros(3).copy_(x), 'copy to host'),
        (lambda x: torch.save(x, io.BytesIO()), 'copy to host'),
        (lambda x: x[x > 0], 'data-dependent aten::index'),
        (lambda x: x.nonzero(), 'data-dependent aten::nonzero'),
        (lambda x: torch.equal(x, x), 'data-dependent aten::equal'),
    ],
)
def test_reading_executes(torch_gcu, card, read, reason):
    x = torch.ones(3, device='xla:0') + 1
    read(x)
    assert executions(card) == {reason: 1}


def test_unlazy_runs_what_it_is_given(torch_gcu, card):
    one, two = (torch.ones(3, device='xla:0') + number for number in (1, 2))
    far = torch.ones(3, device='xla:1') + 1
    torch_gcu.unlazy([one, far])
    assert [card.is_pending(tensor) for tensor in (one, two, far)] == [False, True, False]
    assert executions(card) == executions(card, 1) == {'unlazy': 1}
    for wrong in ([torch.ones(3)], one, [one, 3]):
        with pytest.raises(TypeError, match='must be a list of GCU tensor'):
            torch_gcu.unlazy(wrong)
    with pytest.raises(TypeError, match='unexpected keyword argument'):
        torch_gcu.unlazy([one], device='xla:0')


def test_one_card_is_synchronized_alone(torch_gcu, card):
    near, far = torch.ones(3, device='xla:0') + 1, torch.ones(3, device='xla:1') + 1
    torch_gcu.sync_lived_tensor(torch.device('xla', 1), torch_gcu.JitRunMode.ASYNC)
    assert (card.is_pending(near), card.is_pending(far)) == (True, False)


def test_optimizer_step_names_its_outputs(torch_gcu, card):
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).to('xla:0')
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    loss = net(torch.rand(4, 3).to('xla:0')).square().sum()
    other = loss * 2
    loss.backward()
    torch_gcu.optimizer_step(optimizer, [loss], model=net)
    assert executions(card) == {'optimizer_step': 1}
    buffers = [state['momentum_buffer'] for state in optimizer.state.values()]
    for tensor in (*net.parameters(), *net.buffers(), *buffers, loss):
        assert not card.is_pending(tensor)
    assert card.is_pending(other)
    gradients = torch_gcu.fetch_gradients(optimizer)
    assert len(gradients) == 4
    assert card.is_pending(gradients[0])


def test_steady_training_compiles_once(torch_gcu, card):
    net = small_net().to('xla:0')
    outputs = lambda optimizer, loss: torch_gcu.optimizer_step(  # noqa: E731
        optimizer, [loss], model=net
    )
    train(net, 'xla:0', outputs, iterations=5)
    assert executions(card) == {'optimizer_step': 5}
    # The first iteration makes the momentum buffers and runs the initialization, too.
    assert card.stats(0)['compilations'] == 2
    torch_gcu.clear_graph_caches()
    assert card.stats(0)['graphs'] == 0


def test_calls_and_modes_are_counted(torch_gcu, card):
    import t20_card

    x = torch.ones(3, device='xla:0') + 1
    torch_gcu.unlazy([x], torch_gcu.JitRunMode.SYNC)
    torch_gcu.sync_lived_tensor()
    assert t20_card.calls['unlazy'] == t20_card.calls['sync_lived_tensor'] == 1
    assert t20_card.modes == dict(SYNC=1, SAFEASYNC=1)
    with pytest.raises(TypeError, match='JitRunMode'):
        torch_gcu.sync_lived_tensor(mode='SYNC')


# Memory, words


def test_memory_is_counted_by_card(torch_gcu, card):
    before = torch_gcu.get_hbm_alloc_size('xla:6')
    x = torch.zeros(1000, device='xla:6')
    assert torch_gcu.get_hbm_alloc_size(6) == before + 4000
    assert str(before + 4000) in torch_gcu.dump_hbm_alloc_info(6)
    assert str(before + 4000) in torch_gcu.dump_glob_hbm_use_info(6)
    del x
    assert torch_gcu.get_hbm_alloc_size(6) == before
    with pytest.raises(IndexError):
        torch_gcu.get_hbm_alloc_size(9)


def test_reports(torch_gcu, card):
    x = torch.ones(3, device='xla:4') + 1
    assert '2 operations' in torch_gcu.get_graph(x, 4)
    with pytest.raises(TypeError):
        torch_gcu.get_graph([torch.ones(3)])
    x.cpu()
    report = torch_gcu.metrics_report()
    assert 'Counter: Execute.copy to host\n  Value: 1' in report
    torch_gcu.add_trace_point('here', 0.1)
    assert torch_gcu.get_version()


# Seeds


def test_seeds(torch_gcu, card):
    import t20_card

    draws = []
    for seed in (5, 5, 6):
        torch_gcu.manual_seed_all(seed)
        draws.append(torch.rand(4, device='xla:3').cpu())
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[1], draws[2])
    assert t20_card.seeds[-3:] == [5, 5, 6]
    for wrong in (-1, 2**32):
        with pytest.raises(ValueError, match='4294967295'):
            torch_gcu.manual_seed_all(wrong)


def test_seed_of_the_host_is_none_of_the_card(torch_gcu, card):
    torch_gcu.manual_seed_all(5)
    draws = []
    for _ in range(2):
        torch.manual_seed(7)
        draws.append(torch.rand(4, device='xla:0').cpu())
    assert not torch.equal(*draws)
    state = torch.get_rng_state()
    nn.functional.dropout(torch.ones(100, device='xla:0'))
    assert torch.equal(torch.get_rng_state(), state)


# What importing replaces


def test_tensors_are_printed_through_the_host(torch_gcu, card):
    x = torch.ones(2, device='xla:3')
    assert repr(x) == "tensor([1., 1.], device='xla:3')"
    assert x.is_gcu()
    assert not x.cpu().is_gcu()


@pytest.mark.parametrize(('saved', 'current', 'loaded'), [(2, 2, 'xla:2'), (2, 0, 'cpu')])
def test_files_load_to_the_card_that_is_current(torch_gcu, card, saved, current, loaded):
    file = io.BytesIO()
    torch.save(torch.arange(3.0).to(f'xla:{saved}'), file)
    file.seek(0)
    with torch_gcu.device(current):
        tensor = torch.load(file)
    assert tensor.device == torch.device(loaded)
    assert tensor.cpu().tolist() == [0, 1, 2]


# Mixed precision


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_autocast_is_that_of_cuda(torch_gcu, card, dtype):
    net, x = nn.Linear(3, 3).to('xla:0'), torch.rand(2, 3, device='xla:0')
    with torch_gcu.amp.autocast(dtype=dtype):
        assert torch.is_autocast_enabled()
        assert net(x).dtype == dtype
        with torch_gcu.amp.autocast(enabled=False):
            assert net(x).dtype == torch.float32
    assert not torch.is_autocast_enabled()
    assert net(x).dtype == torch.float32
    with pytest.raises(RuntimeError, match='does not support torch.float32'):
        torch_gcu.amp.autocast(dtype=torch.float32)


def scaled_step(scaler, net, optimizer, factor=1.0):
    optimizer.zero_grad()
    scaler.scale(net(torch.ones(2, 3, device='xla:0')).sum() * factor).backward()
    scaler.step(optimizer)
    scaler.update()


def test_scaler_ends_in_the_fault_of_the_vendors(torch_gcu, card):
    net = nn.Linear(3, 1).to('xla:0')
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch_gcu.amp.GradScaler()
    assert not isinstance(scaler, torch.cuda.amp.GradScaler)
    with pytest.raises(TypeError, match="unexpected keyword argument 'device'"):
        scaled_step(scaler, net, optimizer)
    with pytest.raises(AssertionError):
        scaler.scale(torch.ones(1))


def test_scaler_that_zeroes_gradients(torch_gcu, card):
    net = nn.Linear(3, 1).to('xla:0')
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch_gcu.amp.GradScaler(init_scale=8.0, growth_interval=2, use_zero_grad=True)
    before = net.weight.detach().cpu()
    scaled_step(scaler, net, optimizer, factor=float('inf'))
    assert torch.equal(net.weight.cpu(), before)
    assert scaler.get_scale() == 4.0
    for _ in range(2):
        scaled_step(scaler, net, optimizer)
    torch.testing.assert_close(net.weight.cpu(), before - 0.4)
    assert scaler.get_scale() == 8.0
    outputs = torch_gcu.collect_amp_training_params(net, optimizer, scaler)
    assert len(outputs) == 4
    other = torch_gcu.amp.GradScaler(use_zero_grad=True)
    other.load_state_dict(scaler.state_dict())
    assert other.get_scale() == 8.0


# Several cards, several processes


def test_data_parallel(torch_gcu, card):
    net = nn.Linear(3, 2).to('xla:0')
    whole = net(torch.ones(6, 3, device='xla:0')).sum()
    whole.backward()
    expected, net.weight.grad = net.weight.grad, None
    wrapped = torch_gcu.nn.DataParallel(net, [0, 1, 2])
    result = wrapped(torch.ones(6, 3))
    assert result.device == torch.device('xla:0')
    result.sum().backward()
    torch.testing.assert_close(net.weight.grad.cpu(), expected.cpu())
    with pytest.raises(RuntimeError, match='but found one of them on device: xla:0'):
        torch_gcu.nn.DataParallel(net, [1, 2])(torch.ones(6, 3))


@pytest.mark.parametrize(
    ('backend', 'message'), [('eccl', "doesn't have ECCL built in"), ('gloo', 'only support eccl')]
)
def test_groups_are_refused(torch_gcu, card, tmp_path, backend, message):
    from torch_gcu import distributed

    assert not distributed.is_eccl_available()
    with pytest.raises(RuntimeError, match=message):
        distributed.init_process_group(
            backend, init_method=f'file://{tmp_path}/store', rank=0, world_size=1
        )
    assert not distributed.is_initialized()


def test_collectives_want_a_group(torch_gcu, card):
    from torch_gcu import distributed

    x = torch.ones(2, device='xla:0')
    net = nn.Linear(3, 2).to('xla:0')
    for call in (
        lambda: distributed.all_reduce(x),
        lambda: distributed.broadcast(x, 0),
        lambda: distributed.all_gather([x], x),
        lambda: distributed.barrier(),
        lambda: distributed.get_rank(),
        lambda: distributed.batch_isend_irecv([distributed.P2POp(distributed.isend, x, 1)]),
        lambda: torch_gcu.utils.data.DistributedSampler(range(4)),
        lambda: torch_gcu.nn.parallel.DistributedDataParallel(net, device_ids=[0]),
    ):
        with pytest.raises(RuntimeError, match='process group has not been initialized'):
            call()
    with pytest.raises(RuntimeError, match='Expected parameter `tensor`'):
        distributed.all_reduce(3)
    with pytest.raises(AssertionError):
        distributed.destroy_process_group()


def test_sampler_with_numbers(torch_gcu, card):
    sampler = torch_gcu.utils.data.DistributedSampler(range(7), 2, 1, shuffle=False)
    assert list(sampler) == [1, 3, 5, 0]


def test_gloo_refuses_tensors_of_the_card(torch_gcu, card, tmp_path):
    import torch.distributed as dist

    store = f'file://{tmp_path}/store'
    dist.init_process_group('gloo', init_method=store, rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match='device'):
            dist.all_reduce(torch.ones(2, device='xla:0'))
    finally:
        dist.destroy_process_group()
