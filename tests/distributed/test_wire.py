"""What crosses the links between hosts, counted by the interfaces of network namespaces."""

import os
import sys

import card
import pytest
import torch
from torch import distributed as torch_dist

from benchmarks.hosts import Hosts, HostsError, counter_file, run_ranks
from mmdevplug import DeviceDistributedDataParallel, init_device
from tests.jobs import install_card, largest_difference, load_file, torch_before
from tests.on_hosts import need_hosts, run_on_hosts

STEPS = 6
BATCH = 16
WIDTH = 384
#: TCP's headers and acknowledgements.
OVERHEAD = 1.05


def build():
    torch.manual_seed(0)
    linear = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(6)]
    return torch.nn.Sequential(*[part for layer in linear for part in (layer, torch.nn.Tanh())])


GRADIENT_BYTES = sum(parameter.numel() * 4 for parameter in build().parameters())


class Training:
    """Trains on this rank's part of each batch, and knows how many steps it made."""

    def __init__(self, model, device, rank, world_size):
        self.model, self.device = model, device
        self.part = slice(rank * BATCH // world_size, (rank + 1) * BATCH // world_size)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        self.made = 0

    def train(self, steps):
        for _ in range(steps):
            generator = torch.Generator().manual_seed(self.made)
            batch = torch.randn(BATCH, WIDTH, generator=generator)[self.part]
            self.optimizer.zero_grad()
            self.model(batch.to(self.device)).square().mean().backward()
            self.optimizer.step()
            self.made += 1


def work(accelerator, options, folder):
    """A rank: train, and count what its host sends."""

    install_card(accelerator)
    context = init_device('pytorch', accelerator, forced_backend='gloo', timeout=60)
    model = DeviceDistributedDataParallel(build(), **options)
    rank, world_size = context.env.rank, context.env.world_size
    training = Training(model, context.device, rank, world_size)

    def sent(steps):
        torch_dist.barrier()
        before = bytes_sent()
        # Nobody sends anything before all have looked.
        torch_dist.barrier()
        training.train(steps)
        torch_dist.barrier()
        found = bytes_sent() - before
        torch_dist.barrier()
        return found

    training.train(3)  # DDP arranges its buckets anew in the first ones
    # The median of three: what TCP sends again when the machine is busy is none of ours.
    differences = sorted(sent(2 * STEPS) - sent(STEPS) for _ in range(3))
    weights = {name: value.cpu() for name, value in model.module.state_dict().items()}
    torch.save(weights, os.path.join(folder, f'{rank}.pt'))
    # What is sent once for each measurement is in both.
    found = dict(sent=differences[1], steps=training.made)
    torch_dist.barrier()
    return found


def bytes_sent():
    with open(counter_file('tx')) as file:
        return int(file.read())


def run(folder, accelerator, ranks_per_host, **options):
    """Train on two hosts.

    Returns:
        tuple: For each host the bytes that it sent in ``STEPS`` steps, for each rank its output,
        and for each rank its weights.
    """
    with Hosts(2, rate='1gbit') as hosts:
        by_rank = run_on_hosts(work, ranks_per_host, hosts, accelerator, options, str(folder))
    weights = [load_file(folder / f'{rank}.pt', True) for rank in range(len(by_rank))]
    return [found['sent'] for found in by_rank[::ranks_per_host]], by_rank, weights


@pytest.fixture(scope='module', autouse=True)
def _possible():
    need_hosts()


@pytest.fixture(scope='module')
def job(tmp_path_factory):
    """``job(accelerator, ranks_per_host, **options)``: what :func:`run` returns, run once."""
    done = {}

    def get(accelerator, ranks_per_host, **options):
        if accelerator == 'zeta' and card.MISSING:
            pytest.skip(card.MISSING)
        key = (accelerator, ranks_per_host, *sorted(options.items()))
        if key not in done:
            folder = tmp_path_factory.mktemp('wire')
            done[key] = run(folder, accelerator, ranks_per_host, **options)
        return done[key]

    return get


def single(steps):
    training = Training(build(), torch.device('cpu'), 0, 1)
    training.train(steps)
    return training.model.state_dict()


@pytest.mark.parametrize('ranks_per_host', [1, 2])
@pytest.mark.parametrize('accelerator', ['cpu', 'zeta'])
def test_no_host_sends_more_than_a_ring(job, accelerator, ranks_per_host):
    sent, by_rank, weights = job(accelerator, ranks_per_host)
    world_size = 2 * ranks_per_host
    ring = 2 * GRADIENT_BYTES * (world_size - 1) / world_size
    for bytes_ in sent:
        # Less than once would be too little for the hosts to agree.
        assert GRADIENT_BYTES * STEPS <= bytes_ <= ring * STEPS * OVERHEAD
    expected = single(by_rank[0]['steps'])
    for state in weights:
        assert largest_difference(state, expected) <= 1e-5


@pytest.mark.skipif(torch_before('2.9.0'), reason='gloo before 2.9 adds up no bfloat16')
@pytest.mark.parametrize('accelerator', ['cpu', 'zeta'])
def test_bfloat16_halves_what_is_sent(job, accelerator):
    sent, _, _ = job(accelerator, 1)
    compressed, by_rank, weights = job(accelerator, 1, grad_compression='bf16')
    for fewer, bytes_ in zip(compressed, sent):
        assert 0.45 * bytes_ <= fewer <= 0.55 * bytes_
    assert largest_difference(weights[0], weights[1]) == 0
    assert largest_difference(weights[0], single(by_rank[0]['steps'])) <= 1e-2


def test_ranks_of_a_host_send_once(job):
    sent, _, _ = job('zeta', 2)
    for bytes_ in sent:
        # As if each host were a rank: 2 * G * (2 - 1) / 2.
        assert bytes_ <= GRADIENT_BYTES * STEPS * OVERHEAD


def test_a_failing_rank_ends_the_job_and_leaves_nothing():
    script = 'import os, time; time.sleep(600 * (os.environ["RANK"] == "0")); raise SystemExit(3)'
    with pytest.raises(HostsError, match='rank 1 with exit status 3'):
        with Hosts(2) as hosts:
            run_ranks([sys.executable, '-c', script], 1, hosts)
    assert not [name for name in os.listdir('/run/netns') if name in hosts.names]


def test_links_have_the_rate_asked_for():
    with Hosts(2, rate='200mbit') as hosts:
        seconds = run_ranks([sys.executable, '-c', STREAM], 1, hosts, timeout=60)
        received = hosts.counters()[1]['rx']
    reached = STREAM_BYTES * 8 / float(seconds[1])
    assert 0.8 * 200e6 <= reached <= 1.05 * 200e6
    assert received >= STREAM_BYTES


STREAM_BYTES = 8 << 20
#: The first host sends to the second, which prints for how many seconds it received.
STREAM = f"""
import os, socket, time
if os.environ['RANK'] == '1':
    with socket.create_server(('10.0.0.2', 5000)) as server:
        source, _ = server.accept()
    begin, left = time.perf_counter(), {STREAM_BYTES}
    while left:
        left -= len(source.recv(min(left, 1 << 20)))
    print(time.perf_counter() - begin)
else:
    for attempt in range(100):
        try:
            target = socket.create_connection(('10.0.0.2', 5000))
            break
        except ConnectionRefusedError:
            time.sleep(0.1)
    target.sendall(bytes({STREAM_BYTES}))
    target.close()
"""
