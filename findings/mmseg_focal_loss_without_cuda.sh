#!/usr/bin/env bash
# mmsegmentation 1.2.2 with torch 2.13.0 on the CPU, and on any device but CUDA: FocalLoss raises RuntimeError "The size
# of tensor a (3) must match the size of tensor b (32)" for labels. There it takes one column of their one-hot code,
# `target[:, num_classes]`, in place of the first num_classes columns. One-hot targets work.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/env"
"$folder/env/bin/pip" install -q "setuptools<81" wheel
"$folder/env/bin/pip" install -q torch==2.13.0 "numpy<2" mmengine==0.10.7 mmcv-lite==2.1.0 mmsegmentation==1.2.2 ftfy regex
cat >"$folder/show.py" <<'P'
import sys
from unittest import mock

import torch
from torch.nn import functional

sys.modules['mmcv.ops'] = mock.MagicMock()  # mmcv-lite has none, and the loss on the CPU uses none
import mmseg
from mmseg.models.losses import FocalLoss

torch.manual_seed(0)
scores = torch.randn(2, 3, 4, 4)
labels = torch.randint(0, 3, (2, 4, 4))


def outcome(target):
    try:
        return round(FocalLoss()(scores, target).item(), 4)
    except RuntimeError as error:
        return f'RuntimeError: {error}'


found = {
    'labels': outcome(labels),
    'one-hot': outcome(functional.one_hot(labels, 3).movedim(-1, 1)),
}
print('mmseg', mmseg.__version__, 'torch', torch.__version__)
for case, value in found.items():
    print(f'{case}: {value}')
sys.exit([isinstance(value, str) for value in found.values()] != [True, False])
P
OMP_NUM_THREADS=1 "$folder/env/bin/python" -W ignore "$folder/show.py"
