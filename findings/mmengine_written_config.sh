#!/usr/bin/env bash
# mmengine 0.10.7: Config.dump sorts the keys of dicts, also in the config that each run writes to its work directory.
# Where their order builds modules, the written config builds them in another order, and PyTorch gives the state of an
# optimizer to parameters by their places: one who resumes with the written config trains one head with the momentum of
# another of the same shape, without a word.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/env"
"$folder/env/bin/pip" install -q "setuptools<81" wheel
"$folder/env/bin/pip" install -q torch==2.13.0 "numpy<2" mmengine==0.10.7
cat >"$folder/show.py" <<'P'
import sys

import mmengine
import torch
from mmengine.config import Config

path = f'{sys.argv[1]}/written.py'
cfg = Config(dict(heads=dict(zebra=2.0, apple=1.0)))
cfg.dump(path)
written = Config.fromfile(path)


def build(heads):
    model = torch.nn.ModuleDict({name: torch.nn.Linear(1, 1, bias=False) for name in heads})
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


model, optimizer = build(cfg.heads)
sum(head.weight.sum() * cfg.heads[name] for name, head in model.items()).backward()
optimizer.step()
resumed, resumed_optimizer = build(written.heads)
resumed.load_state_dict(model.state_dict())
resumed_optimizer.load_state_dict(optimizer.state_dict())
momentum = {
    name: resumed_optimizer.state[head.weight]['momentum_buffer'].item()
    for name, head in resumed.items()
}
print('mmengine', mmengine.__version__, 'torch', torch.__version__)
print('keys:', list(cfg.heads), 'as written:', list(written.heads))
print('momentum, which was 2 of zebra and 1 of apple:', momentum)
sys.exit(not (list(written.heads) == ['apple', 'zebra'] and momentum == dict(apple=2.0, zebra=1.0)))
P
"$folder/env/bin/python" -W ignore "$folder/show.py" "$folder"
