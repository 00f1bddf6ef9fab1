#!/usr/bin/env bash
# Usage: tools/slurm_test.sh PARTITION JOB_NAME CONFIG CHECKPOINT [arguments of test.py]
# Environment: as for slurm_train.sh, without SIGNAL and BATCH.
set -euo pipefail

if [ $# -lt 4 ]; then
    echo "Usage: $0 PARTITION JOB_NAME CONFIG CHECKPOINT [arguments of test.py]" >&2
    exit 2
fi
DEVICES=${DEVICES:-${GPUS:-8}}
DEVICES_PER_NODE=${DEVICES_PER_NODE:-${GPUS_PER_NODE:-8}}
TOOLS=$(cd "$(dirname "$0")" && pwd)
export PYTHONPATH="$(dirname "$TOOLS")${PYTHONPATH:+:$PYTHONPATH}"

# shellcheck disable=SC2086  # SRUN_ARGS holds several words
exec srun -p "$1" \
    --job-name="$2" \
    ${GRES:+--gres=$GRES} \
    --ntasks="$DEVICES" \
    --ntasks-per-node="$DEVICES_PER_NODE" \
    --cpus-per-task="${CPUS_PER_TASK:-5}" \
    --kill-on-bad-exit=1 \
    ${SRUN_ARGS:-} \
    "${PYTHON:-python}" -u "$TOOLS/test.py" "$3" "$4" --launcher slurm "${@:5}"
