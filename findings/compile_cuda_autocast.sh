#!/usr/bin/env bash
# torch 2.15.0 on Python 3.13: torch.compile of a function that enters torch.cuda.amp.autocast(...) ends in
# InternalTorchDynamoError (KeyError: dtype), with any backend and also where autocast is disabled. The class has a
# signature of (*args, **kwargs) there, in which the compiler looks for its arguments. On Python 3.11 the same release
# compiles it, and on 3.13 it compiles torch.autocast('cuda', ...). mmdet's and mmseg's models use the former.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.13}" -m venv "$folder/env"
PIP_CONFIG_FILE=/dev/null "$folder/env/bin/pip" install -q torch==2.15.0 numpy
cat >"$folder/show.py" <<'P'
import inspect
import sys

import torch


def compiled(autocast):
    @torch.compile(backend='eager')
    def step(x):
        with autocast():
            return x @ x

    try:
        return 'compiles' if step(torch.ones(2, 2)).shape == (2, 2) else 'other shape'
    except Exception as error:
        return f'{type(error).__name__}: {str(error).splitlines()[0]}'


old = compiled(lambda: torch.cuda.amp.autocast(enabled=False))
new = compiled(lambda: torch.autocast('cuda', enabled=False))
print(torch.__version__, inspect.signature(torch.cuda.amp.autocast))
print('torch.cuda.amp.autocast(enabled=False):', old)
print("torch.autocast('cuda', enabled=False):", new)
sys.exit(not (old == 'InternalTorchDynamoError: KeyError: dtype' and new == 'compiles'))
P
"$folder/env/bin/python" -W ignore "$folder/show.py"
