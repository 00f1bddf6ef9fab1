#!/usr/bin/env bash
# mmpose 1.3.2 with mmengine 0.10.7: SyncNormHook, which shall average the statistics of batch norm over the ranks before
# a validation, averages nothing. It takes all_reduce_dict() for a function that returns the averages; that one writes
# them into its argument and returns None. The hook catches the error and logs it, and each rank validates its own model.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/env"
"$folder/env/bin/pip" install -q "setuptools<81" wheel
"$folder/env/bin/pip" install -q torch==2.13.0 "numpy<2" "opencv-python<4.12" mmengine==0.10.7 mmcv-lite==2.1.0 \
    xtcocotools==1.14.3 json_tricks munkres scipy
"$folder/env/bin/pip" install -q --no-deps mmpose==1.3.2
cat >"$folder/show.py" <<'P'
import logging
import os
import sys
from types import SimpleNamespace

import torch
from torch import distributed, multiprocessing, nn


def work(rank, folder):
    os.environ.update(RANK=str(rank), WORLD_SIZE='2')
    store = distributed.FileStore(f'{folder}/store', 2)
    distributed.init_process_group('gloo', store=store, rank=rank, world_size=2)
    import mmpose
    from mmpose.engine.hooks import SyncNormHook

    model = nn.Sequential(nn.Conv2d(3, 1, 1), nn.BatchNorm2d(1))
    model[1].running_mean.fill_(rank)
    SyncNormHook().before_val_epoch(SimpleNamespace(model=model, logger=logging.getLogger()))
    means = [torch.zeros(1) for _ in range(2)]
    distributed.all_gather(means, model[1].running_mean)
    distributed.destroy_process_group()
    if rank == 0:
        found = [each.item() for each in means]
        print('mmpose', mmpose.__version__, 'torch', torch.__version__)
        print('running_mean of two ranks, 0 and 1 before, after the hook:', found)
        sys.exit(found != [0.0, 1.0])


if __name__ == '__main__':
    multiprocessing.spawn(work, (sys.argv[1],), 2)
P
OMP_NUM_THREADS=1 "$folder/env/bin/python" -W ignore "$folder/show.py" "$folder"
