"""accelerate on two ranks of two devices each:
``torchrun --nproc-per-node 2 accelerate_ranks.py cuda``."""

import os
import sys

# Without it accelerate refuses a model on several devices, or sees a single process.
os.environ['ACCELERATE_BYPASS_DEVICE_MAP'] = 'true'

import torch
from accelerate import Accelerator
from tiny_llama import letters, tiny_llama

import mmdevplug.staged  # noqa: F401  registers the backend
from mmdevplug.device_guard import DeviceGuard
from mmdevplug.model_parallel import dispatch, plan

device_type = sys.argv[1]
if 'WORLD_SIZE' in os.environ:
    torch.distributed.init_process_group('staged')  # gloo refuses gradients of most cards
# For accelerate the CPU computes, so that it moves nothing; DDP averages where the parts are.
accelerator = Accelerator(cpu=True)
rank = accelerator.local_process_index
model = tiny_llama()
if device_type != 'cpu':
    dispatch(model, plan(model, f'{device_type}:{2 * rank}-{2 * rank + 1}', training=True))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
tokens = letters(24)
# Ranks take turns with the batches: 4 samples on each of 2 ranks are 8 on one.
loader = torch.utils.data.DataLoader(tokens, batch_size=8 // accelerator.num_processes)
model, optimizer, loader = accelerator.prepare(
    model, optimizer, loader, device_placement=[False, True, True]
)
losses = []
with DeviceGuard('move', model=accelerator.unwrap_model(model)) as guard:
    for batch in loader:
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach().cpu()[None]).mean().item())
accelerator.print(guard.report())
accelerator.print(accelerator.num_processes, 'rank(s), samples of each in a step:', len(batch))
accelerator.print('losses', *[f'{loss:.6f}' for loss in losses])
