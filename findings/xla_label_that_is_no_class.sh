#!/usr/bin/env bash
# torch 2.9.0 with torch_xla 2.9.0 on PJRT's CPU client: a label that is no class has a loss of 0 in cross_entropy, and
# the mean leaves it out, as if it were to be ignored; an index behind the end of a table is its last row. The CPU raises
# IndexError for both, CUDA ends the process. A wrong number of classes or a forgotten ignore_index trains on there.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.9.0 torch_xla==2.9.0 numpy
cat >"$folder/show.py" <<'P'
import sys

import torch
import torch_xla
from torch.nn import functional

torch.manual_seed(0)
scores, labels = torch.randn(4, 3), torch.tensor([0, 1, 2, 255])
table, indices = torch.arange(6.0).view(3, 2), torch.tensor([0, 7])
on = torch_xla.device()


def outcome(function, *args):
    try:
        return function(*args).cpu().flatten().tolist()
    except IndexError as error:
        return f'IndexError: {error}'


def each(scores, labels):
    return functional.cross_entropy(scores, labels, reduction='none')


found = {}
for name, function, args in (
    ('loss of each label', each, (scores, labels)),
    ('mean', functional.cross_entropy, (scores, labels)),
    ('rows of a table', functional.embedding, (indices, table)),
):
    found[name] = outcome(function, *args), outcome(function, *(arg.to(on) for arg in args))
print('torch', torch.__version__, 'torch_xla', torch_xla.__version__)
for name, (host, device) in found.items():
    print(f'{name}: CPU {host}; torch_xla {device}')
silent = found['loss of each label'][1][3] == 0 and found['rows of a table'][1][2:] == [4, 5]
sys.exit(not (silent and all('IndexError' in host for host, _ in found.values())))
P
PJRT_DEVICE=CPU OMP_NUM_THREADS=1 "$folder/env/bin/python" -W ignore "$folder/show.py"
