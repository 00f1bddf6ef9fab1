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

"$PYTHON" -m mmdevplug.cli.launch "$NUM_DEVICES" "$CONFIG" "${@:4}"
if [ "${NNODES:-1}" = 1 ]; then
    # Left over from another job, these would be waited for.
    MASTER_ADDR=127.0.0.1
    NODE_RANK=0
fi
exec "$PYTHON" -m mmdevplug.cli.agent \
    --nnodes="${NNODES:-1}" \
    --node_rank="${NODE_RANK:-0}" \
    --master_addr="$MASTER_ADDR" \
    --master_port="${PORT:-29500}" \
    --nproc_per_node="$NUM_DEVICES" \
    "$TOOLS/test.py" "$CONFIG" "$CHECKPOINT" --launcher pytorch "${@:4}"
