#!/usr/bin/env bash
# MMEngine 0.10.7: custom_imports of a new-style config (one with an import, or read_base) is not read. What the modules
# register is missing later, or, where a module only changes something, nothing says that it was never imported. The
# same line in an old-style config imports them when the config is read.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/env"
"$folder/env/bin/pip" install -q "setuptools<81" wheel
"$folder/env/bin/pip" install -q torch==2.13.0 "numpy<2" mmengine==0.10.7
echo "" >"$folder/registers_things.py"
echo "custom_imports = dict(imports=['registers_things'], allow_failed_imports=False)" >"$folder/old_style.py"
{ echo 'from torch.nn import Linear'; cat "$folder/old_style.py"; } >"$folder/new_style.py"
cat >"$folder/show.py" <<'P'
import sys

import mmengine
from mmengine.config import Config

print('mmengine', mmengine.__version__)
found = []
for name in ('new_style.py', 'old_style.py'):
    imports = Config.fromfile(name).custom_imports['imports']
    found.append('registers_things' in sys.modules)
    print(f'{name}: custom_imports {list(imports)}, imported: {found[-1]}')
sys.exit(found != [False, True])
P
cd "$folder" && OMP_NUM_THREADS=1 "$folder/env/bin/python" -W ignore show.py
