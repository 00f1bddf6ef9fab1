#!/usr/bin/env bash
# mmengine 0.10.7: all loops over a loader with an InfiniteSampler draw from one generator, which is closed when a loop
# that stopped early is collected. The others then end with StopIteration. A hook that looks at some batches of the
# training data, as mmpretrain's PreciseBNHook does, so ends a training by iterations, without another word.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/env"
"$folder/env/bin/pip" install -q "setuptools<81" wheel
"$folder/env/bin/pip" install -q torch==2.13.0 "numpy<2" mmengine==0.10.7
cat >"$folder/show.py" <<'P'
import sys

import mmengine
from mmengine.dataset import DefaultSampler, InfiniteSampler
from torch.utils.data import DataLoader


def batches_after_a_look(sampler):
    loader = DataLoader(range(8), batch_size=2, sampler=sampler(range(8), shuffle=False))
    training = iter(loader)
    next(training)
    for _ in loader:
        break
    return len(list(zip(training, range(3))))


found = {kind.__name__: batches_after_a_look(kind) for kind in (DefaultSampler, InfiniteSampler)}
print('mmengine', mmengine.__version__)
print('batches that a loop gets after another one has looked at the first:', found)
sys.exit(found != dict(DefaultSampler=3, InfiniteSampler=0))
P
"$folder/env/bin/python" -W ignore "$folder/show.py"
