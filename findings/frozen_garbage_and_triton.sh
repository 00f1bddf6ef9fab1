#!/usr/bin/env bash
# torch 2.15.0 (CUDA build) with the triton that it installs: a process that has imported torch._dynamo and called
# gc.freeze(), as Python's documentation advises before workers are forked, ends with some thirty lines on standard
# error: "nanobind: leaked 4 instances!", types and functions. Without gc.freeze(), or with gc.unfreeze() at exit,
# there are none. Status 0 in all cases; a message of the program itself is not the last line any more.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.13}" -m venv "$folder/env"
PIP_CONFIG_FILE=/dev/null "$folder/env/bin/pip" install -q torch==2.15.0 numpy
count() { "$folder/env/bin/python" -W ignore -c "import atexit, gc, torch._dynamo; $1" 2>&1 | grep -c '^nanobind: leaked' || true; }
frozen=$(count 'gc.freeze()')
plain=$(count 'pass')
unfrozen=$(count 'gc.freeze(); atexit.register(gc.unfreeze)')
echo "lines that begin with 'nanobind: leaked': after gc.freeze() $frozen, without it $plain, unfrozen at exit $unfrozen"
[ "$frozen" -gt 0 ] && [ "$plain" = 0 ] && [ "$unfrozen" = 0 ]
