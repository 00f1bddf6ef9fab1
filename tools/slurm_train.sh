#!/usr/bin/env bash
# Usage: tools/slurm_train.sh PARTITION JOB_NAME CONFIG [arguments of train.py]
# Environment: DEVICES or GPUS (in all), DEVICES_PER_NODE or GPUS_PER_NODE, CPUS_PER_TASK,
# GRES (e.g. gpu:8), SRUN_ARGS, PYTHON for the interpreter. SIGNAL (USR1@60): a minute before the
# time limit every process is told to save. BATCH=1 submits a batch job, which goes back to the
# queue when it is preempted or out of time, and resumes by itself.
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
SIGNAL=${SIGNAL:-USR1@60}
TOOLS=$(cd "$(dirname "$0")" && pwd)
export PYTHONPATH="$(dirname "$TOOLS")${PYTHONPATH:+:$PYTHONPATH}"

RESOURCES=(
    -p "$PARTITION"
    --job-name="$JOB_NAME"
    ${GRES:+--gres="$GRES"}
    --ntasks="$DEVICES"
    --ntasks-per-node="$DEVICES_PER_NODE"
    --cpus-per-task="${CPUS_PER_TASK:-5}"
)
COMMAND=("${PYTHON:-python}" -u "$TOOLS/train.py" "$CONFIG" --launcher slurm "${@:4}")

# shellcheck disable=SC2086  # SRUN_ARGS holds several words
if [ -n "${BATCH:-}" ]; then
    exec sbatch "${RESOURCES[@]}" --requeue --open-mode=append --signal="B:$SIGNAL" \
        ${SRUN_ARGS:-} "$TOOLS/slurm_job.sh" "${COMMAND[@]}"
fi
# shellcheck disable=SC2086
exec srun "${RESOURCES[@]}" --signal="$SIGNAL" --kill-on-bad-exit=1 ${SRUN_ARGS:-} "${COMMAND[@]}"
