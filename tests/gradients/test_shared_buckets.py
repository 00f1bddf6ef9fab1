"""PyTorch's DDP on the CPU, its buckets averaged in memory that the ranks of a host share."""

import pytest
import torch
from torch import nn

from mmdevplug import DeviceDistributedDataParallel, init_device
from mmdevplug.errors import ModelError
from mmdevplug.staged import reductions
from tests.gradients.averaging import shared_sums
from tests.ranks import in_ranks, run_ranks

STEPS = 4
#: As the least bytes of a sum that ranks share memory for.
NOTHING = float('inf')
#: gloo of PyTorch 1 broadcasts no bfloat16.
COARSE = torch.float64 if torch.__version__.startswith('1.') else torch.bfloat16


class Mixed(nn.Module):
    """Layers of several dtypes, one of them with a sparse gradient."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 40, sparse=True)
        self.layers = nn.ModuleList(nn.Linear(40, 40) for _ in range(6))
        self.exact = nn.Linear(40, 40).double()
        self.coarse = nn.Linear(40, 3).to(COARSE)

    def forward(self, indices):
        found = self.table(indices)
        for layer in self.layers:
            found = layer(found).tanh()
        found = self.exact(found.double()).tanh()
        return self.coarse(found.to(COARSE)).float().square().mean()


def wrap(model, least_bytes=0, **options):
    """Wrap a model; small ones share memory, too, unless ``least_bytes`` is infinite."""
    reductions.LEAST_BYTES = least_bytes
    rank = init_device('pytorch', 'cpu').env.rank
    options = dict(bucket_cap_mb=0.02, **options)
    return DeviceDistributedDataParallel(model, accelerator='cpu', **options), rank


def train(least_bytes=0, static=False):
    """Weights after some steps, and how many sums were in shared memory."""
    torch.manual_seed(0)
    model, rank = wrap(Mixed(), least_bytes)
    if static:
        model._set_static_graph()  # PyTorch 1.10 has no argument for it
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    random = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randint(50, (8,), generator=random)).backward()
        optimizer.step()
    weights = [parameter.detach().float().numpy() for parameter in model.module.parameters()]
    return weights, shared_sums(model)


@pytest.mark.parametrize('ranks', [2, 3])
def test_averages_are_those_of_messages(ranks):
    shared = run_ranks(train, ranks)
    messages = run_ranks(train, ranks, NOTHING)
    for (found, in_memory), (expected, none) in zip(shared, messages):
        assert in_memory > 0 == none
        # Of three ranks, a share is added up in another order; the last layer is coarse.
        for place, (ours, theirs) in enumerate(zip(found, expected)):
            assert abs(ours - theirs).max() <= (1e-5 if place < len(found) - 2 else 1e-3)


def test_small_gradients_are_averaged_by_messages():
    assert [in_memory for _, in_memory in run_ranks(train, 2, 1 << 20)] == [0, 0]


def test_a_graph_that_ddp_takes_for_static_shares_memory_too():
    static, plain = run_ranks(train, 2, 0, True), run_ranks(train, 2)
    for (found, in_memory), (expected, _) in zip(static, plain):
        assert in_memory > 0
        for ours, theirs in zip(found, expected):
            assert abs(ours - theirs).max() <= 1e-6


@in_ranks(2)
def test_a_gradient_that_is_not_finite_is_named_on_all_ranks():
    model, rank = wrap(Mixed())
    loss = model(torch.arange(8)) * (float('nan') if rank == 1 else 1)
    with pytest.raises(ModelError) as raised:
        loss.backward()
    assert 'rank 1: ' in str(raised.value)
    assert 'layers.0.weight (1600 NaN, 0 Inf of 1600)' in str(raised.value)
    assert 'rank 0:' not in str(raised.value)


def join_early(least_bytes):
    torch.manual_seed(0)
    layers = nn.Sequential(*[nn.Linear(40, 40) for _ in range(6)])
    model, rank = wrap(layers, least_bytes)
    model(torch.ones(2, 40)).sum().backward()
    with model.join():
        for step in range(2 + 2 * rank):  # rank 1 goes on alone
            model(torch.full((2, 40), 1.0 + step)).sum().backward()
    return shared_sums(model), [parameter.grad.numpy() for parameter in layers.parameters()]


def test_ranks_that_join_are_answered():
    shared, messages = run_ranks(join_early, 2, 0), run_ranks(join_early, 2, NOTHING)
    for (in_memory, found), (none, expected) in zip(shared, messages):
        assert in_memory > 0 == none
        for ours, theirs in zip(found, expected):
            assert abs(ours - theirs).max() <= 1e-4
