#!/usr/bin/env bash
# mmpretrain 1.2.0 with mmengine 0.10.7: SwitchRecipeHook with a `loss` asks whether the model is wrapped, of mmpretrain's
# own registry. That one does not know the wrappers of MMEngine's, its parent, so that a model in DDP is none: the hook
# looks for the loss in the wrapper and raises RuntimeError on ranks, where one process trains.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/env"
"$folder/env/bin/pip" install -q "setuptools<81" wheel
"$folder/env/bin/pip" install -q torch==2.13.0 "numpy<2" "opencv-python<4.12" mmengine==0.10.7 mmcv-lite==2.1.0 \
    mmpretrain==1.2.0
cat >"$folder/show.py" <<'P'
import sys

import mmengine
import mmpretrain
import torch
from mmengine.model import MMDistributedDataParallel, is_model_wrapper
from mmpretrain.registry import MODEL_WRAPPERS

store = torch.distributed.HashStore()
torch.distributed.init_process_group('gloo', store=store, rank=0, world_size=1)
model = MMDistributedDataParallel(torch.nn.Linear(1, 1))
found = is_model_wrapper(model), is_model_wrapper(model, MODEL_WRAPPERS)
torch.distributed.destroy_process_group()
print('mmpretrain', mmpretrain.__version__, 'mmengine', mmengine.__version__)
print('is DDP a wrapper? by MMEngine and by the registry of mmpretrain:', found)
sys.exit(found != (True, False))
P
"$folder/env/bin/python" -W ignore "$folder/show.py"
