#!/usr/bin/env bash
# Usage: tools/slurm_train.sh PARTITION JOB_NAME CONFIG [arguments of train.py]
# Environment: DEVICES or GPUS (in all), DEVICES_PER_NODE or GPUS_PER_NODE, CPUS_PER_TASK,
# GRES (e.g. gpu:8), SRUN_ARGS, PYTHON for the interpreter.
set -euo pipefail

if [ $# -lt 3 ]; then
    echo "Usage: $0 PARTITION JOB_NAME CONFIG [arguments of train.py]" >&2
    exit 2
fi
PARTITION=$1
JOB_NAME=$2
CONFIG=$3
DEVICES=${DEVICES:-${GPUS:-8}}
DEVICES_PER_NODE=${DEVICES_PER_NODE:-${GPUS_PER_NODE:-8}}
TOOLS=$(cd "$(dirname "$0")" && pwd)
export PYTHONPATH="$(dirname "$TOOLS")${PYTHONPATH:+:$PYTHONPATH}"

# shellcheck disable=SC2086  # SRUN_ARGS holds several words
exec srun -p "$PARTITION" \
    --job-name="$JOB_NAME" \
    ${GRES:+--gres=$GRES} \
    --ntasks="$DEVICES" \
    --ntasks-per-node="$DEVICES_PER_NODE" \
    --cpus-per-task="${CPUS_PER_TASK:-5}" \
    --kill-on-bad-exit=1 \
    ${SRUN_ARGS:-} \
    "${PYTHON:-python}" -u "$TOOLS/train.py" "$CONFIG" --launcher slurm "${@:4}"
