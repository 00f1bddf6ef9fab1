#!/usr/bin/env bash
# MMEngine 0.10.7 with torch 2.13.0: a model with get_extra_state() trains in one process, and no training begins on two.
# PyTorch lets a module return any picklable state there. MMEngine's runner sends each entry of state_dict() of rank 0
# to the other ranks before it trains, and takes tensors alone: it raises a TypeError that names neither the module nor
# the key. One process sends nothing, and saves and loads the state as it should.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/env"
"$folder/env/bin/pip" install -q "setuptools<81" wheel
"$folder/env/bin/pip" install -q torch==2.13.0 "numpy<2" mmengine==0.10.7
cat >"$folder/show.py" <<'P'
import os
import sys
import tempfile
import warnings

import mmengine
import torch
from mmengine.model import BaseModel
from mmengine.runner import Runner
from torch import distributed, multiprocessing, nn

warnings.simplefilter('ignore')


class Counting(BaseModel):
    def __init__(self):
        super().__init__()
        self.layer, self.seen = nn.Linear(2, 1), 0

    def get_extra_state(self):
        return dict(seen=self.seen)

    def set_extra_state(self, state):
        self.seen = state['seen']

    def forward(self, inputs, mode='tensor'):
        self.seen += len(inputs)
        return dict(loss=self.layer(inputs).square().mean())


def train(rank, ranks, folder, outcomes):
    wrapper = dict(type='MMDistributedDataParallel', device_ids=None)
    if ranks > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
        store = distributed.FileStore(f'{folder}/store', ranks)
        distributed.init_process_group('gloo', store=store, rank=rank, world_size=ranks)
    runner = Runner(
        Counting(),
        tempfile.mkdtemp(dir=folder),
        train_dataloader=dict(
            batch_size=2,
            dataset=[dict(inputs=torch.ones(2))] * 8,
            sampler=dict(type='DefaultSampler'),
            collate_fn=dict(type='default_collate'),
        ),
        train_cfg=dict(by_epoch=True, max_epochs=1),
        optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.1)),
        cfg=dict(model_wrapper_cfg=wrapper),
        log_level='ERROR',
    )
    try:
        runner.train()
        outcome = f'{runner.iter} iterations'
    except TypeError as error:
        outcome = f'TypeError: {error}'
    if rank == 0:
        outcomes.put(outcome)


if __name__ == '__main__':
    print('mmengine', mmengine.__version__, 'torch', torch.__version__)
    found = []
    for ranks in (1, 2):
        outcomes = multiprocessing.get_context('spawn').SimpleQueue()
        multiprocessing.spawn(train, (ranks, tempfile.mkdtemp(), outcomes), ranks)
        found.append(outcomes.get())
        print(f'{ranks} process(es): {found[-1]}')
    sys.exit(not (found[0] == '4 iterations' and found[1].startswith('TypeError: data should be a Tensor')))
P
OMP_NUM_THREADS=1 "$folder/env/bin/python" -W ignore "$folder/show.py"
