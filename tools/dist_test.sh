#!/usr/bin/env bash
# Usage: tools/dist_test.sh CONFIG CHECKPOINT NUM_DEVICES [arguments of test.py]
# Environment: NNODES, NODE_RANK, PORT, MASTER_ADDR for several hosts; PYTHON for the interpreter.
set -euo pipefail

if [ $# -lt 3 ]; then
    echo "Usage: $0 CONFIG CHECKPOINT NUM_DEVICES [arguments of test.py]" >&2
    exit 2
fi
CONFIG=$1
CHECKPOINT=$2
NUM_DEVICES=$3
PYTHON=${PYTHON:-python}
TOOLS=$(cd "$(dirname "$0")" && pwd)
# So that a checkout works without being installed.
export PYTHONPATH="$(dirname "$TOOLS")${PYTHONPATH:+:$PYTHONPATH}"

export MAX_RESTARTS=0
exec "$PYTHON" -m mmdevplug.cli.launch --script "$TOOLS/test.py" \
    "$NUM_DEVICES" "$CONFIG" "$CHECKPOINT" "${@:4}"
