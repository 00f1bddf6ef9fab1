"""FSDP2 over the backend ``staged``: weights of one process, and PyTorch's sharded checkpoints."""

import pytest
import torch
from torch import distributed as torch_dist, nn

from mmdevplug import init_device
from tests.columns import NATIVE
from tests.ranks import in_ranks

from .test_collectives import RELEASE, start

# PyTorch before 2.13 has no functional collectives for a card without kernels for them, which
# gather a whole weight from its shards.
pytestmark = pytest.mark.skipif(RELEASE < (2, 13), reason='DTensor on a card needs PyTorch 2.13')
STEPS = 3


def build():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(24, 24) for _ in range(4)])


def batch(rank, step):
    return torch.randn(8, 24, generator=torch.Generator().manual_seed(100 * step + rank))


def shard(device):
    """The model, each layer of which is spread over all ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (torch_dist.get_world_size(),))
    model = build().to(device)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def whole(model):
    return {name: p.full_tensor().detach().cpu() for name, p in model.named_parameters()}


@pytest.mark.parametrize('ranks', [2, 4])
@pytest.mark.parametrize('device', ['cpu', 'streams', NATIVE])
@in_ranks()
def test_fully_shard_equals_one_process(device, ranks, tmp_path):
    """So do the weights of another model that loads the shards which this one saved."""
    from torch.distributed import checkpoint

    if device == NATIVE:
        where = init_device('pytorch', NATIVE, timeout=60).device
    else:
        where = start(device)
    rank, folder = torch_dist.get_rank(), str(tmp_path / 'shards')
    model = shard(where)
    assert all(p.to_local().numel() < p.numel() for p in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(rank, step).to(where)).square().mean().backward()
        optimizer.step()
    trained = whole(model)
    checkpoint.save(model.state_dict(), checkpoint_id=folder)
    other = shard(where)
    state = other.state_dict()
    checkpoint.load(state, checkpoint_id=folder)
    other.load_state_dict(state)
    loaded = whole(other)
    if device != NATIVE:  # whose own group takes no tensors of the host
        loaded = load_as_others_do(model, shard(where), f'{folder}-later') or loaded
    torch_dist.barrier()
    torch_dist.destroy_process_group()
    for name, value in alone(ranks).items():
        torch.testing.assert_close(trained[name], value, rtol=0, atol=1e-6, msg=name)
        assert torch.equal(loaded[name], trained[name]), name


def load_as_others_do(model, other, folder):
    """Save in the background, and load what rank 0 alone has read."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    checkpoint.async_save(model.state_dict(), checkpoint_id=folder).result()
    state = build().state_dict()
    checkpoint.load(state, checkpoint_id=folder)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, state if torch_dist.get_rank() == 0 else {}, options=options)
    return whole(other)


def alone(ranks):
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        sum(model(batch(rank, step)).square().mean() for rank in range(ranks)).div(
            ranks
        ).backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}
