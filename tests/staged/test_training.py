"""PyTorch's own wrappers, hooks and optimizers over the backend ``staged``, as they are."""

import os
import re
from functools import partial

import pytest
import torch
from torch import distributed as torch_dist, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from tests.columns import XLA, job_of
from tests.commands import python
from tests.jobs import PATHS, ROOT
from tests.ranks import errors_of_ranks, run_ranks

from .test_collectives import RELEASE, pytestmark, start  # noqa: F401

EAGER = ['cpu', 'zeta', 'streams']


class Net(nn.Module):
    """A head of which one part is used in every second iteration."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 3)
        self.other = nn.Linear(8, 3)
        self.register_buffer('seen', torch.zeros(1))

    def forward(self, inputs, both=True):
        self.seen += 1
        features = self.stem(inputs)
        return self.head(features) + (self.other(features) if both else 0)


def batch(rank, step):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator)


def train(device, options=None, hook=None, sharded=False, accumulate=1, halved=False, steps=4):
    """Weights after some steps, by name, of stock PyTorch."""
    where = start(device)
    rank = torch_dist.get_rank()
    torch.manual_seed(5 + rank)  # DDP sends rank 0's weights
    net = Net().to(where)
    options = dict(options or {})
    model = DistributedDataParallel(net, **options)
    if hook == 'fp16':
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    if hook == 'powersgd':
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=8, start_powerSGD_iter=2, min_compression_rate=0.1
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    if sharded:
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), optimizer_class=torch.optim.SGD, lr=0.1, momentum=0.9
        )
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(accumulate):
            inputs, targets = (each.to(where) for each in batch(rank, step * accumulate + part))
            both = not (halved and step % 2)
            synchronizes = part == accumulate - 1
            with model.no_sync() if not synchronizes else torch.enable_grad():
                loss = (model(inputs, both) - targets).square().mean() / accumulate
                loss.backward()
        optimizer.step()
    weights = {name: value.detach().cpu() for name, value in net.named_parameters()}
    torch_dist.destroy_process_group()
    return weights


def alone(accumulate=1, halved=False, ranks=2, steps=4):
    """The same with the batches of all ranks in one process."""
    torch.manual_seed(5)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(accumulate):
            for rank in range(ranks):
                inputs, targets = batch(rank, step * accumulate + part)
                both = not (halved and step % 2)
                loss = (net(inputs, both) - targets).square().mean() / accumulate / ranks
                loss.backward()
        optimizer.step()
    return {name: value.detach() for name, value in net.named_parameters()}


def check(device, tolerance=1e-6, ranks=2, **options):
    shared = {key: options[key] for key in ('accumulate', 'halved') if key in options}
    expected = alone(ranks=ranks, **shared)
    results = run_ranks(partial(train, **options), ranks, device, **job_of(device, ranks))
    for weights in results:
        assert weights.keys() == expected.keys()
        for name, value in weights.items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=tolerance, msg=name)
            assert torch.equal(value, results[0][name]), name
    return results[0]


@pytest.mark.parametrize('device', [*EAGER, XLA])
def test_ddp_equals_one_process(device):
    check(device)


@pytest.mark.parametrize('device', EAGER)
@pytest.mark.parametrize(
    'options',
    [
        dict(accumulate=2),
        dict(options=dict(find_unused_parameters=True), halved=True),
        dict(options=dict(static_graph=True, gradient_as_bucket_view=True)),
        dict(options=dict(bucket_cap_mb=1e-4, broadcast_buffers=False)),
        dict(sharded=True),
        dict(hook='fp16', tolerance=2e-3),
        dict(hook='powersgd', tolerance=2e-2),
    ],
    ids=['accumulation', 'unused', 'static', 'buckets', 'zero', 'fp16', 'powersgd'],
)
def test_what_pytorch_offers_works(device, options):
    check(device, **options)


def test_a_card_is_as_the_cpu_to_the_bit_on_three_ranks():
    on_card = check('zeta', ranks=3)
    on_host = check('cpu', ranks=3)
    assert all(torch.equal(on_card[name], value) for name, value in on_host.items())


def lost(device):
    """Rank 1 ends in the middle of backward."""
    where = start(device, timeout=20)
    model = DistributedDataParallel(Net().to(where))
    loss = model(batch(0, 0)[0].to(where)).sum()
    if torch_dist.get_rank() == 1:
        os._exit(3)
    loss.backward()


@pytest.mark.parametrize('device', EAGER)
def test_a_lost_rank_ends_backward(device):
    _, message = errors_of_ranks(lost, 2, device)[0]
    assert 'rank 0 of 2: all_reduce of' in message


def on_two_ranks(*words, path=ROOT):
    """What torchrun prints of a script."""
    variables = dict(OMP_NUM_THREADS='1', CPU_NUM_DEVICES='2', PYTHONPATH=str(path))
    command = ['-m', 'torch.distributed.run', '--standalone', '--nproc_per_node', 2, *words]
    done = python(*command, env=dict(os.environ, **variables))
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize('device', ['cpu', XLA])
def test_the_script_of_the_page(device):
    line = on_two_ranks('docs/examples/staged_ddp.py', device).splitlines()[-1]
    found = re.fullmatch(rf'{device}(:0)?: loss (\S+), weights equal on 2 ranks: True', line)
    assert float(found[2]) < 1e-4


def test_the_script_for_accelerate():
    pytest.importorskip('accelerate')
    line = on_two_ranks('docs/examples/staged_accelerate.py').splitlines()[-1]
    found = re.fullmatch(r'backend staged: loss (\S+), weights equal on 2 ranks: True', line)
    assert float(found[1]) < 1e-4


WIDE = """
import sys
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
import mmdevplug.staged

distributed.init_process_group('staged')
model = DistributedDataParallel(nn.Linear(1024, 1024))  # summed in memory that ranks share
model(torch.ones(2, 1024)).sum().backward()
group = distributed.group.WORLD
if sys.argv[1] == 'destroy':
    distributed.destroy_process_group()
    try:
        group.barrier()
    except RuntimeError as error:
        assert 'the group has ended' in str(error), error
"""
MMENGINE = """
from mmengine.config import Config
from mmengine.runner import Runner

config = Config.fromfile('configs/digits/digits_cpu.py')
config.merge_from_dict(dict(work_dir=__file__ + '.dir', launcher='pytorch'))
config.train_cfg.max_epochs = 1
Runner.from_cfg(config).train()
"""


@pytest.mark.skipif(RELEASE < (2, 6), reason='PyTorch names its threads since 2.6')
@pytest.mark.parametrize('how', ['destroy', 'leave', 'mmengine', 'accelerate'])
def test_no_thread_of_gloo_outlives_the_program(how, tmp_path):
    script = tmp_path / 'script.py'
    script.write_text(MMENGINE if how == 'mmengine' else WIDE)
    if how == 'accelerate':
        script = ROOT / 'docs/examples/staged_accelerate.py'
    told = on_two_ranks('tests/staged/threads_left.py', script, how, path=PATHS)
    assert told.count('threads that run collectives: 0') == 2, told
