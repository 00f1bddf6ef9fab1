#!/usr/bin/env bash
# torch 2.9.0 with torch_xla 2.9.0, PJRT_DEVICE=CPU: under autocast in bfloat16 the gradient of the bias of nn.Linear,
# nn.Conv2d and nn.ConvTranspose2d is a fraction of what it should be once it is added up over some hundred positions: the
# sum is kept in bfloat16 and stops growing. The weights of the same layers have the right gradient, and so have the
# biases on the CPU under autocast. Nothing is said.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.9.0 torch_xla==2.9.0 numpy
cat >"$folder/show.py" <<'P'
import sys

import torch
import torch_xla
from torch import nn


def gradients(make, shape, device, half):
    torch.manual_seed(0)
    layer, x = make().to(device), torch.rand(shape).to(device)
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=half):
        out = layer(x)
    out.float().sum().backward()
    return layer.weight.grad.float().cpu(), layer.bias.grad.float().cpu()


def off(found, expected):
    return round(float((found - expected).abs().max() / expected.abs().max()), 3)


# Before the first backward on the CPU, or none would work on torch_xla.
there = torch.ones(1, device=torch_xla.device()).device
print(torch.__version__, torch_xla.__version__)
changed = False
for name, make, shape in (
    ('Linear', lambda: nn.Linear(8, 8), (4, 64, 64, 8)),
    ('Conv2d', lambda: nn.Conv2d(8, 8, 1), (4, 8, 64, 64)),
    ('ConvTranspose2d', lambda: nn.ConvTranspose2d(8, 8, 2, 2), (4, 8, 64, 64)),
):
    cpu = torch.device('cpu')
    expected = gradients(make, shape, cpu, False)
    for where, device in (('CPU', cpu), ('torch_xla', there)):
        weight, bias = map(off, gradients(make, shape, device, True), expected)
        print(f'{name}, bfloat16 on {where}: weight off by {weight}, bias off by {bias}')
        changed |= weight > 0.05 or (bias > 0.5) != (where == 'torch_xla')
sys.exit(changed)
P
PJRT_DEVICE=CPU OMP_NUM_THREADS=1 "$folder/env/bin/python" -W ignore "$folder/show.py"
