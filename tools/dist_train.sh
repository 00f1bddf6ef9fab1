#!/usr/bin/env bash
# Usage: tools/dist_train.sh CONFIG NUM_DEVICES [arguments of train.py]
# Environment: NNODES, NODE_RANK, PORT, MASTER_ADDR for several hosts; MAX_RESTARTS for how often
# failed processes are started again, which then resume; PYTHON for the interpreter.
set -euo pipefail

if [ $# -lt 2 ]; then
    echo "Usage: $0 CONFIG NUM_DEVICES [arguments of train.py]" >&2
    exit 2
fi
TOOLS=$(cd "$(dirname "$0")" && pwd)
# So that a checkout works without being installed.
export PYTHONPATH="$(dirname "$TOOLS")${PYTHONPATH:+:$PYTHONPATH}"

START=(--nproc "$2" ${NNODES:+--nnodes "$NNODES"})
if [ "${NNODES:-1}" != 1 ]; then # of a single host they are left over from another job
    START+=(${NODE_RANK:+--node-rank "$NODE_RANK"} ${MASTER_ADDR:+--master-addr "$MASTER_ADDR"})
fi
START+=(${PORT:+--master-port "$PORT"} ${MAX_RESTARTS:+--max-restarts "$MAX_RESTARTS"})
exec "${PYTHON:-python}" "$TOOLS/train.py" "$1" "${START[@]}" "${@:3}"
