#!/usr/bin/env bash
# torch 2.13.0 on the CPU: in float32 a bin of torch.histc stops at 2 ** 24 = 16,777,216, for each thread; torch.bincount
# does not. mmsegmentation 1.2.2 counts pixels so: with one thread, IoUMetric gives an image of 4000 x 5000 pixels, of
# which a quarter is predicted as another class, an IoU of 89.4 instead of 75 without a word.
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

sys.modules['mmcv.ops'] = mock.MagicMock()  # mmcv-lite has none, and the metric uses none
import mmseg
from mmseg.evaluation import IoUMetric

torch.set_num_threads(1)
label = torch.zeros(4000, 5000, dtype=torch.long)
predicted = label.clone()
predicted[:1000] = 1
counted = torch.histc(label.float(), bins=2, min=0, max=1)[0].item()
areas = IoUMetric.intersect_and_union(predicted, label, num_classes=2, ignore_index=255)
measured = 100 * (areas[0] / areas[1])[0].item()
expected = 100 * ((predicted == 0) & (label == 0)).sum().item() / label.numel()
print('mmseg', mmseg.__version__, 'torch', torch.__version__)
print('pixels of class 0:', torch.bincount(label.flatten())[0].item(), 'by histc:', int(counted))
print(f'IoU of class 0: {expected:.1f}, by IoUMetric: {measured:.1f}')
sys.exit(not (counted == 2**24 and abs(measured - expected) > 1))
P
OMP_NUM_THREADS=1 "$folder/env/bin/python" -W ignore "$folder/show.py"
