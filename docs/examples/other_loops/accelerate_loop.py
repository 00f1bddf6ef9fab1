"""accelerate with one model over several devices: ``python accelerate_loop.py cuda:0-1``.

On several ranks give each its own devices; ``samples`` shares what they draw.
"""

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from tiny_llama import letters, tiny_llama

from mmdevplug.device_guard import DeviceGuard
from mmdevplug.model_parallel import dispatch, plan

devices = sys.argv[1]
accelerator = Accelerator(cpu=devices == 'cpu')
model = tiny_llama()
if devices != 'cpu':
    dispatch(model, plan(model, devices, training=True))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
tokens = letters(20)
loader = torch.utils.data.DataLoader(tokens, batch_size=4)
# The model is placed: accelerate need not move it.
model, optimizer, loader = accelerator.prepare(
    model, optimizer, loader, device_placement=[False, True, True]
)
set_seed(0, device_specific=True)  # each rank draws its own random numbers
losses = []
with DeviceGuard('move', model=model) as guard:
    for batch in loader:
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
accelerator.print(guard.report())
accelerator.print('losses', *[f'{loss:.6f}' for loss in losses])
