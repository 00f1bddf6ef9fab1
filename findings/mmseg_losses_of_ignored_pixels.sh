#!/usr/bin/env bash
# mmsegmentation 1.2.2 with torch 2.13.0: DiceLoss counts ignored pixels (255) as pixels of the last class, and
# HuasdorffDisstanceLoss looks at their scores, too. Both get ignore_index=255 and have gradients at these pixels, which
# the cross entropy, the Tversky and the Lovasz loss leave out.
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

sys.modules['mmcv.ops'] = mock.MagicMock()  # mmcv-lite has none, and these losses use none
import mmseg
from mmseg.models.losses import CrossEntropyLoss, DiceLoss, HuasdorffDisstanceLoss, LovaszLoss, TverskyLoss

torch.manual_seed(0)
labels = torch.randint(0, 4, (2, 16, 16))
ignored = torch.rand(2, 16, 16) < 0.3
labels[ignored] = 255
scores = torch.randn(2, 4, 16, 16)


def gradient(loss):
    """The largest gradient at an ignored pixel."""
    leaf = scores.clone().requires_grad_()
    loss(leaf, labels, ignore_index=255).backward()
    return leaf.grad.movedim(1, -1)[ignored].abs().max().item()


dice = DiceLoss(use_sigmoid=False)
losses = [CrossEntropyLoss(), TverskyLoss(), LovaszLoss(per_image=True), dice, HuasdorffDisstanceLoss()]
found = {type(loss).__name__: gradient(loss) for loss in losses}
print('mmseg', mmseg.__version__, 'torch', torch.__version__)
for name, value in found.items():
    print(f'{name}: gradient at ignored pixels {value:.1e}')
sys.exit([value > 0 for value in found.values()] != [False, False, False, True, True])
P
OMP_NUM_THREADS=1 "$folder/env/bin/python" -W ignore "$folder/show.py"
