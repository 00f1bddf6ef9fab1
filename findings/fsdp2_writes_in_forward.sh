#!/usr/bin/env bash
# torch 2.13.0, FSDP2 (fully_shard) over gloo, two processes: what a model writes into its own weights in forward() is
# thrown away, without a word. A momentum encoder of the root module that is averaged there (`k.lerp_(q, 0.5)`, as MoCo,
# BYOL and mean teachers do) keeps its first weights; so it does with `k.data = ...`. One process and DDP average it.
# Weights are whole while forward() runs, in memory that is freed after it, and nothing is copied back to the parts.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 numpy
cat >"$folder/show.py" <<'P'
import os
import sys

import torch
from torch import distributed, multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Teacher(nn.Module):
    def __init__(self, assigns):
        super().__init__()
        self.student, self.teacher, self.assigns = nn.Linear(4, 4), nn.Linear(4, 4), assigns
        nn.init.ones_(self.student.weight)
        nn.init.zeros_(self.teacher.weight)
        self.teacher.requires_grad_(False)

    def forward(self, x):
        q, k = self.student.weight, self.teacher.weight
        with torch.no_grad():
            if self.assigns:
                k.data = k.data * 0.5 + q.data * 0.5
            else:
                k.lerp_(q, 0.5)
        return (self.student(x) - self.teacher(x)).square().mean()


def average(sharded, assigns):
    model = Teacher(assigns)
    if sharded:
        fully_shard(model, mesh=init_device_mesh('cpu', (2,)))
    model(torch.ones(2, 4)).backward()
    weight = model.teacher.weight
    return (weight.full_tensor() if sharded else weight).mean().item()


def work(rank, folder):
    os.environ.update(MASTER_ADDR='127.0.0.1', MASTER_PORT='29513')
    store = distributed.FileStore(f'{folder}/store', 2)
    distributed.init_process_group('gloo', store=store, rank=rank, world_size=2)
    found = [average(True, assigns) for assigns in (False, True)]
    distributed.destroy_process_group()
    if rank == 0:
        alone = [average(False, assigns) for assigns in (False, True)]
        print(torch.__version__)
        print('mean weight of the teacher, which was 0, one process, lerp_ and .data:', alone)
        print('sharded over two processes:', found)
        sys.exit(not (alone == [0.5, 0.5] and found == [0.0, 0.0]))


if __name__ == '__main__':
    multiprocessing.spawn(work, (sys.argv[1],), 2)
P
OMP_NUM_THREADS=1 "$folder/env/bin/python" -W ignore "$folder/show.py" "$folder"
