#!/usr/bin/env bash
# Usage: tools/dist_test.sh CONFIG CHECKPOINT NUM_DEVICES [arguments of test.py]
# Environment: NNODES, NODE_RANK, PORT, MASTER_ADDR for several hosts; PYTHON for the interpreter.
set -euo pipefail

if [ $# -lt 3 ]; then
    echo "Usage: $0 CONFIG CHECKPOINT NUM_DEVICES [arguments of test.py]" >&2
    exit 2
fi
TOOLS=$(cd "$(dirname "$0")" && pwd)
# So that a checkout works without being installed.
export PYTHONPATH="$(dirname "$TOOLS")${PYTHONPATH:+:$PYTHONPATH}"

START=(--nproc "$3" ${NNODES:+--nnodes "$NNODES"})
if [ "${NNODES:-1}" != 1 ]; then # of a single host they are left over from another job
    START+=(${NODE_RANK:+--node-rank "$NODE_RANK"} ${MASTER_ADDR:+--master-addr "$MASTER_ADDR"})
fi
START+=(${PORT:+--master-port "$PORT"})
exec "${PYTHON:-python}" "$TOOLS/test.py" "$1" "$2" "${START[@]}" "${@:4}"
