#!/usr/bin/env bash
# torch 2.13.0, backend gloo, two processes: all_reduce with MAX or MIN keeps NaN of some ranks and loses that of others,
# by where in the tensor it lies. FSDP2 takes the norm of order infinity so: where one rank's part of a gradient is NaN,
# clip_grad_norm_(norm_type=inf, error_if_nonfinite=True) returns a number and raises nothing.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 numpy
cat >"$folder/show.py" <<'P'
import math
import sys

import torch
from torch import distributed, multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def largest(rank, other):
    values = torch.tensor([math.nan] if rank == other else [1.0])
    distributed.all_reduce(values, distributed.ReduceOp.MAX)
    return values.item()


def clip(row, order):
    model = nn.Linear(4, 4, bias=False)
    fully_shard(model, mesh=init_device_mesh('cpu', (2,)))
    weight = torch.ones(4)
    weight[row] = math.nan  # rows 0 and 1 are the part of rank 0
    (model(torch.ones(2, 4)) * weight).sum().backward()
    clip = nn.utils.clip_grad_norm_
    try:
        norm = clip(model.parameters(), 1.0, norm_type=order, error_if_nonfinite=True)
    except RuntimeError:
        return 'RuntimeError'
    return norm.full_tensor().item()


def work(rank, folder):
    store = distributed.FileStore(f'{folder}/store', 2)
    distributed.init_process_group('gloo', store=store, rank=rank, world_size=2)
    maxima = [largest(rank, other) for other in (0, 1)]
    norms = [clip(row, order) for row in (0, 3) for order in (2.0, math.inf)]
    distributed.destroy_process_group()
    if rank == 0:
        print(torch.__version__)
        print('maximum of 1 and NaN, where NaN is of rank 0, of rank 1:', maxima)
        print('norms with NaN in the part of rank 0 (2, inf), of rank 1 (2, inf):', norms)
        kept = math.isnan(maxima[0]) and maxima[1] == 1.0
        sys.exit(not (kept and norms == ['RuntimeError'] * 3 + [2.0]))


if __name__ == '__main__':
    multiprocessing.spawn(work, (sys.argv[1],), 2)
P
OMP_NUM_THREADS=1 "$folder/env/bin/python" -W ignore "$folder/show.py" "$folder"
