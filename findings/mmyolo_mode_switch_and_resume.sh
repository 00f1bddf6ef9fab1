#!/usr/bin/env bash
# mmyolo 0.6.0 with mmengine 0.10.7: YOLOXModeSwitchHook switches in one epoch alone, `epoch + 1 == max_epochs -
# num_last_epochs`. A training that is resumed later trains on with Mosaic and MixUp and without the auxiliary loss,
# without a word: in the uninterrupted one they had changed. With num_last_epochs=2 it switches before the last three.
# mmdet's hook of the same purpose asks whether the epoch has been reached.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/env"
"$folder/env/bin/pip" install -q "setuptools<81" wheel
"$folder/env/bin/pip" install -q torch==2.13.0 "numpy<2" mmengine==0.10.7 "opencv-python<4.12" mmdet==3.3.0
"$folder/env/bin/pip" install -q --no-build-isolation mmcv-lite==2.0.1
"$folder/env/bin/pip" install -q --no-deps mmyolo==0.6.0
cat >"$folder/show.py" <<'P'
import os
import runpy
import sys
import tempfile

import torch

os.environ['TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD'] = '1'  # MMEngine's checkpoints, with PyTorch 2.6 and later
import mmyolo
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.registry import DATASETS, MODELS
from mmengine.runner import Runner

# The file alone: its package imports models, which need mmcv's operators.
file = os.path.join(os.path.dirname(mmyolo.__file__), 'engine/hooks/yolox_mode_switch_hook.py')
YOLOXModeSwitchHook = runpy.run_path(file)['YOLOXModeSwitchHook']


@DATASETS.register_module()
class Images(torch.utils.data.Dataset):
    def __init__(self, pipeline):
        self.pipeline = pipeline

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return torch.ones(1)


@MODELS.register_module()
class Detector(BaseModel):
    def __init__(self):
        super().__init__()
        self.bbox_head = torch.nn.Linear(1, 1)
        self.bbox_head.use_bbox_aux = False

    def forward(self, inputs, mode='tensor'):
        return dict(loss=self.bbox_head(inputs).sum())


class Recorder(Hook):
    def __init__(self):
        self.epochs = {}

    def after_train_epoch(self, runner):
        head, loader = runner.model.bbox_head, runner.train_loop.dataloader
        self.epochs[runner.epoch + 1] = (loader.dataset.pipeline, head.use_bbox_aux)


def train(work_dir, **options):
    recorder = Recorder()
    switch = YOLOXModeSwitchHook(num_last_epochs=2, new_train_pipeline='plain')
    loader = dict(
        batch_size=1, sampler=dict(type='DefaultSampler'), dataset=dict(type='Images', pipeline='mosaic')
    )
    cfg = dict(
        model=dict(type='Detector'), work_dir=work_dir, train_dataloader=loader,
        optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.1)), train_cfg=dict(by_epoch=True, max_epochs=4),
        experiment_name=work_dir.replace('/', '_') + str(len(options)),
        log_level='ERROR', default_hooks=dict(checkpoint=dict(type='CheckpointHook', interval=1)), **options,
    )
    runner = Runner.from_cfg(Config(cfg))
    for hook in (switch, recorder):
        runner.register_hook(hook)
    runner.train()
    return recorder.epochs


with tempfile.TemporaryDirectory() as folder:
    whole = train(folder)
    resumed = train(folder, resume=True, load_from=f'{folder}/epoch_3.pth')
print('mmyolo', mmyolo.__version__, 'torch', torch.__version__)
print('pipeline and auxiliary loss by epoch:', whole)
print('resumed after epoch 3:', resumed)
sys.exit(not (whole[4] == ('plain', True) and resumed == {4: ('mosaic', False)}))
P
cd "$folder" && OMP_NUM_THREADS=1 env/bin/python -W ignore show.py
