#!/usr/bin/env bash
# What `BATCH=1 tools/slurm_train.sh` submits: runs a command in all tasks of the job, passes on
# Slurm's warning that time is up, and puts the job back into the queue then.
set -uo pipefail

OUT_OF_TIME=
STEP=
warned() {
    OUT_OF_TIME=1
    kill -USR1 "$STEP" # srun passes it on to all tasks, which save and end
}
trap warned USR1
for SIGNAL in TERM INT HUP; do
    # shellcheck disable=SC2064  # the name of now
    trap "kill -$SIGNAL \"\$STEP\"" "$SIGNAL"
done

srun --kill-on-bad-exit=1 "$@" &
STEP=$!
while true; do
    wait "$STEP"
    STATUS=$?
    # A signal ends `wait` early, while the tasks still run.
    kill -0 "$STEP" 2>/dev/null || break
done
if [ -n "$OUT_OF_TIME" ] && [ "$STATUS" = 0 ]; then
    # One task of an array has the number of the array, which stands for all of its tasks.
    TASK=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
    scontrol requeue "${TASK:-$SLURM_JOB_ID}"
fi
exit "$STATUS"
