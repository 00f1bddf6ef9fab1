"""Train with PyTorch's DDP and FSDP2 over the backend ``staged``; started on every rank."""

import os

import torch
from torch import distributed as torch_dist, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import mmdevplug.staged  # noqa: F401

STEPS = 3


def build():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)])


def loss(model, rank, step, device):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return model(torch.randn(8, 32, generator=generator).to(device)).square().mean()


def train(model, losses):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        losses(model, step).backward()
        optimizer.step()


def main():
    torch_dist.init_process_group('staged')
    rank, size = torch_dist.get_rank(), torch_dist.get_world_size()
    # TorchTPU's runtime asks for the addresses of its chips where it reads a world.
    for name in ('WORLD_SIZE', 'RANK', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE'):
        del os.environ[name]
    device = torch.device('tpu', 0)
    alone = build()
    train(alone, lambda m, step: sum(loss(m, r, step, 'cpu') for r in range(size)) / size)

    replicas = DistributedDataParallel(build().to(device))
    train(replicas, lambda m, step: loss(m, rank, step, device))
    shards = build().to(device)
    mesh = init_device_mesh('tpu', (size,))
    for layer in shards:
        fully_shard(layer, mesh=mesh)
    fully_shard(shards, mesh=mesh)
    train(shards, lambda m, step: loss(m, rank, step, device))

    for expected, whole, part in zip(
        alone.parameters(), replicas.parameters(), shards.parameters()
    ):
        torch.testing.assert_close(whole.detach().cpu(), expected.detach(), rtol=0, atol=1e-6)
        assert part.to_local().shape[0] * size == expected.shape[0]
        gathered = part.full_tensor().detach().cpu()
        torch.testing.assert_close(gathered, expected.detach(), rtol=0, atol=1e-6)
    # In one write: torchrun's ranks do not buffer, and share a pipe.
    print(f'rank {rank}: equal on {device}\n', end='', flush=True)
    torch_dist.barrier()
    torch_dist.destroy_process_group()


if __name__ == '__main__':
    main()
