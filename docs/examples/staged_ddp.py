"""PyTorch's own DistributedDataParallel over the backend ``staged``.

``torchrun --nproc_per_node 2 docs/examples/staged_ddp.py [device type]``
"""

import sys

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import mmdevplug.staged  # noqa: F401 - registers the backend

device_type = sys.argv[1] if len(sys.argv) > 1 else 'cpu'
if device_type == 'xla':
    import torch_xla  # noqa: F401

distributed.init_process_group('staged')
rank = distributed.get_rank()
device = torch.device('cpu') if device_type == 'cpu' else torch.device(device_type, rank)
torch.manual_seed(rank)  # DDP sends the weights of rank 0
model = DistributedDataParallel(nn.Linear(4, 1).to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(100):
    inputs = torch.randn(16, 4)
    targets = inputs.sum(1, keepdim=True)
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(inputs.to(device)), targets.to(device))
    loss.backward()
    optimizer.step()
weights = [None] * distributed.get_world_size()
distributed.all_gather_object(weights, model.module.weight.detach().cpu().flatten().tolist())
if rank == 0:
    same = all(found == weights[0] for found in weights)
    print(f'{device}: loss {loss.item():.6f}, weights equal on {len(weights)} ranks: {same}')
distributed.destroy_process_group()
