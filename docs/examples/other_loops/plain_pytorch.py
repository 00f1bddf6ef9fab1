"""One model over several devices in plain PyTorch: ``python plain_pytorch.py cuda:0-1``."""

import sys

import torch
from tiny_llama import letters, tiny_llama

from mmdevplug.device_guard import DeviceGuard
from mmdevplug.model_parallel import dispatch, plan

devices = sys.argv[1]
model = tiny_llama()
if devices != 'cpu':
    placed = plan(model, devices, training=True)
    print(placed)
    dispatch(model, placed)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
losses = []
with DeviceGuard('move', model=model) as guard:
    for tokens in letters(20).split(4):
        logits = model(input_ids=tokens).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
print(guard.report())
print('losses', *[f'{loss:.6f}' for loss in losses])
