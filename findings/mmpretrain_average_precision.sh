#!/usr/bin/env bash
# mmpretrain 1.2.0 with torch 2.13.0: AveragePrecision sorts scores as torch.sort leaves equal ones, and counts each of
# them as a threshold of its own. A model that gives every sample the same score, of which a tenth is of the class, gets
# 100 or 10 by the order of ten samples, and neither 10 with a hundred. Rounded scores have such ties, as of float16 or
# of a sigmoid at 1. A class without samples counts as 0 in the mean. scikit-learn's average_precision_score takes equal
# scores as one threshold.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/env"
"$folder/env/bin/pip" install -q "setuptools<81" wheel
"$folder/env/bin/pip" install -q torch===2.13.0 torchvision==0.28.0 "numpy<2" "opencv-python<4.12" mmengine==0.10.7 \
    mmcv-lite==2.1.0 mmpretrain==1.2.0 scikit-learn
cat >"$folder/show.py" <<'P'
import sys

import mmpretrain
import torch
from mmpretrain.evaluation import AveragePrecision
from sklearn.metrics import average_precision_score


def both(samples, first):
    scores, labels = torch.full((samples, 1), 0.5), torch.zeros(samples, 1, dtype=torch.long)
    places = slice(samples // 10) if first else slice(-(samples // 10), None)
    labels[places] = 1
    theirs = AveragePrecision.calculate(scores, labels).item()
    expected = average_precision_score(labels[:, 0].numpy(), scores[:, 0].numpy()) * 100
    return [round(theirs, 1), round(float(expected), 1)]


ten, hundred = ([both(samples, first) for first in (True, False)] for samples in (10, 100))
scores, labels = torch.eye(2), torch.tensor([[1, 0], [1, 0]])
absent = AveragePrecision.calculate(scores, labels).item()
print('mmpretrain', mmpretrain.__version__, 'torch', torch.__version__)
print('equal scores, mmpretrain and scikit-learn: 10 samples, those of the class first, last:', ten)
print('100 samples:', hundred)
print('two classes, one without samples, the other found:', absent)
wrong = [theirs for theirs, _ in hundred]
sys.exit(
    not (
        ten == [[100.0, 10.0], [10.0, 10.0]]
        and {expected for _, expected in hundred} == {10.0}
        and wrong[0] != wrong[1]
        and absent == 50.0
    )
)
P
"$folder/env/bin/python" -W ignore "$folder/show.py"
