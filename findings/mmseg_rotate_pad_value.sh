#!/usr/bin/env bash
# mmsegmentation 1.2.2 with mmcv 2.1.0: RandomRotate(pad_val=128) fills the corners of an image with 128 in the first
# channel and 0 in all others, blue for grey: it hands the number to OpenCV, for which it is (128, 0, 0, 0). So does
# mmcv.impad(image, pad_val=128). The transform Pad of mmcv takes an int for all channels, and a float (114.0) for the
# first alone. mmdet's Rotate repeats the number.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/env"
"$folder/env/bin/pip" install -q "setuptools<81" wheel
"$folder/env/bin/pip" install -q torch==2.13.0 "numpy<2" mmengine==0.10.7 mmcv-lite==2.1.0 mmsegmentation==1.2.2 ftfy regex
cat >"$folder/show.py" <<'P'
import sys
from unittest import mock

import numpy as np
import torch

sys.modules['mmcv.ops'] = mock.MagicMock()  # mmcv-lite has none, and transforms use none
import mmcv
import mmseg
from mmcv.transforms import Pad
from mmseg.datasets.transforms import RandomRotate

image = np.full((9, 9, 3), 200, np.uint8)


def corner(transform):
    np.random.seed(0)
    results = dict(img=image.copy(), img_shape=(9, 9), seg_fields=[])
    return transform(results)['img'][-1, -1].tolist()


found = {
    'RandomRotate(pad_val=128)': corner(RandomRotate(prob=1.0, degree=(45, 45), pad_val=128)),
    'impad(pad_val=128)': mmcv.impad(image, shape=(12, 12), pad_val=128)[-1, -1].tolist(),
    'Pad(pad_val=dict(img=114))': corner(Pad(size=(12, 12), pad_val=dict(img=114))),
    'Pad(pad_val=dict(img=114.0))': corner(Pad(size=(12, 12), pad_val=dict(img=114.0))),
}
print('mmseg', mmseg.__version__, 'mmcv', mmcv.__version__, 'torch', torch.__version__)
for case, value in found.items():
    print(f'{case}: corner {value}')
expected = [[128, 0, 0], [128, 0, 0], [114, 114, 114], [114, 0, 0]]
sys.exit(list(found.values()) != expected)
P
OMP_NUM_THREADS=1 "$folder/env/bin/python" -W ignore "$folder/show.py"
