#!/usr/bin/env bash
# torch 1.10.0, the release of the T20: a function under the decorator @torch.inference_mode(False) runs in inference
# mode, since each call makes a copy of the decorator that forgets its argument. As a block, `with
# torch.inference_mode(False):`, it leaves the mode. torch 2.13.0 does in both what the argument says.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.8}" -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==1.10.0 'numpy<2'
cat >"$folder/show.py" <<'P'
import sys

import torch


@torch.inference_mode(False)
def decorated():
    return torch.is_inference_mode_enabled()


with torch.inference_mode(False):
    block = torch.is_inference_mode_enabled()
print(torch.__version__, 'inference mode under the decorator:', decorated(), 'in the block:', block)
sys.exit(not (decorated() and not block))
P
"$folder/env/bin/python" "$folder/show.py"
