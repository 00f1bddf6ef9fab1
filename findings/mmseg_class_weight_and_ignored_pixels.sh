#!/usr/bin/env bash
# mmsegmentation 1.2.2 with torch 2.13.0: CrossEntropyLoss with class_weight raises an IndexError as soon as a pixel is
# ignored (255): it looks the weight of class 255 up, for the mean. Without class_weight, and with reduction 'sum', the
# same pixels are passed over. avg_non_ignore=True does not help: it sets these weights to 0 after the lookup. Released
# configs meet it: CGNet's on Cityscapes has class weights, and Cityscapes has ignored pixels.
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

sys.modules['mmcv.ops'] = mock.MagicMock()  # mmcv-lite has none, and the loss uses none
import mmseg
from mmseg.models.losses import CrossEntropyLoss

torch.manual_seed(0)
scores = torch.randn(1, 3, 4, 4)
labels = torch.randint(0, 3, (1, 4, 4))
ignored = labels.clone()
ignored[0, 0, 0] = 255


def outcome(labels, **options):
    try:
        return round(CrossEntropyLoss(**options)(scores, labels, ignore_index=255).item(), 4)
    except IndexError as error:
        return f'IndexError: {error}'


weights = dict(class_weight=[1.0, 2.0, 3.0])
found = {
    'no ignored pixel, class_weight': outcome(labels, **weights),
    'an ignored pixel': outcome(ignored),
    'an ignored pixel, class_weight': outcome(ignored, **weights),
    'an ignored pixel, class_weight, avg_non_ignore': outcome(ignored, avg_non_ignore=True, **weights),
    "an ignored pixel, class_weight, reduction='sum'": outcome(ignored, reduction='sum', **weights),
}
print('mmseg', mmseg.__version__, 'torch', torch.__version__)
for case, value in found.items():
    print(f'{case}: {value}')
sys.exit([isinstance(value, str) for value in found.values()] != [False, False, True, True, False])
P
OMP_NUM_THREADS=1 "$folder/env/bin/python" -W ignore "$folder/show.py"
