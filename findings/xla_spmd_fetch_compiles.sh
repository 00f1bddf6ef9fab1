#!/usr/bin/env bash
# torch 2.9.0 with torch_xla 2.9.0, PJRT_DEVICE=CPU, SPMD on two devices: each .cpu() of a tensor that is sharded by
# mark_sharding compiles a graph and executes it, also of the same tensor for the fifth time; .item() of an element does,
# too. No cache keeps the graph. A tensor that is whole on each device is fetched without either. So a checkpoint of a
# model with 300 sharded weights compiles 300 graphs each time that it is written. The shards themselves
# (XLAShardedTensor(tensor).local_shards) are fetched without a compilation.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.9.0 torch_xla==2.9.0 numpy
cat >"$folder/show.py" <<'P'
import sys

import numpy as np
import torch
import torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch_xla.debug import metrics


def counted():
    found = [metrics.metric_data(name) for name in ('CompileTime', 'ExecuteReplicatedTime')]
    return [data[0] if data else 0 for data in found]


def cost(fetch):
    before = counted()
    for _ in range(5):
        fetch()
    return [b - a for a, b in zip(before, counted())]


xr.use_spmd()
count = xr.global_runtime_device_count()
mesh = xs.Mesh(np.arange(count), (count,), ('chips',))
sharded, whole = (torch.arange(64.0).view(8, 8).to('xla') for _ in range(2))
xs.mark_sharding(sharded, mesh, ('chips', None))
torch_xla.sync(wait=True)
first = whole.cpu()  # runs what is left
same = [torch.equal(first, sharded.cpu())]
parts = [shard.data for shard in xs.XLAShardedTensor(sharded).local_shards]
same.append(torch.equal(first, torch.cat(parts)))
found = dict(
    whole=cost(whole.cpu),
    sharded=cost(sharded.cpu),
    shards=cost(lambda: xs.XLAShardedTensor(sharded).local_shards),
)
print(torch.__version__, torch_xla.__version__, count, 'devices; compilations and executions of five fetches:', found)
sys.exit(not all(same) or found != dict(whole=[0, 0], sharded=[5, 5], shards=[0, 0]))
P
PJRT_DEVICE=CPU CPU_NUM_DEVICES=2 OMP_NUM_THREADS=1 TF_CPP_MIN_LOG_LEVEL=2 "$folder/env/bin/python" -W ignore "$folder/show.py"
