#!/usr/bin/env bash
# Usage: tools/dist_train.sh CONFIG NUM_DEVICES [arguments of train.py]
# Environment: NNODES, NODE_RANK, PORT, MASTER_ADDR for several hosts; MAX_RESTARTS for how often
# failed processes are started again, which then resume; PYTHON for the interpreter.
set -euo pipefail

if [ $# -lt 2 ]; then
    echo "Usage: $0 CONFIG NUM_DEVICES [arguments of train.py]" >&2
    exit 2
fi
CONFIG=$1
NUM_DEVICES=$2
PYTHON=${PYTHON:-python}
TOOLS=$(cd "$(dirname "$0")" && pwd)
# So that a checkout works without being installed.
export PYTHONPATH="$(dirname "$TOOLS")${PYTHONPATH:+:$PYTHONPATH}"

exec "$PYTHON" -m mmdevplug.cli.launch --script "$TOOLS/train.py" "$NUM_DEVICES" "$CONFIG" "${@:3}"
