"""A training loop of accelerate over the backend ``staged``.

``torchrun --nproc_per_node 2 docs/examples/staged_accelerate.py``
"""

import torch
from accelerate import Accelerator
from torch import distributed, nn

import mmdevplug.staged  # noqa: F401 - registers the backend

distributed.init_process_group('staged')  # before accelerate makes a group of its own
accelerator = Accelerator(cpu=True)
torch.manual_seed(accelerator.process_index)  # DDP sends the weights of rank 0
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = accelerator.prepare(model, optimizer)
for _ in range(100):
    inputs = torch.randn(16, 4)
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
    accelerator.backward(loss)
    optimizer.step()
weights = accelerator.gather(model.module.weight.detach())
if accelerator.is_main_process:
    same = bool((weights == weights[0]).all())
    print(
        f'backend {distributed.get_backend()}: loss {loss.item():.6f}, '
        f'weights equal on {len(weights)} ranks: {same}'
    )
distributed.destroy_process_group()
