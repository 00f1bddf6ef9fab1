#!/usr/bin/env bash
# What `BATCH=1 tools/slurm_train.sh` submits: runs a command in all tasks of the job, passes on
# Slurm's warning that time is up, and puts the job back into the queue then.
set -uo pipefail

OUT_OF_TIME=
STEP=
PASSED_ON=
pass_on() {
    PASSED_ON=1
    kill "-$1" "$STEP" # srun passes it on to all tasks
}
trap 'OUT_OF_TIME=1; pass_on USR1' USR1 # they save and end
for SIGNAL in TERM INT HUP; do
    # shellcheck disable=SC2064  # the name of now
    trap "pass_on $SIGNAL" "$SIGNAL"
done

srun --kill-on-bad-exit=1 "$@" &
STEP=$!
# A signal ends `wait` early; the tasks may still run, or have just ended.
while true; do
    PASSED_ON=
    wait "$STEP"
    STATUS=$?
    [ -n "$PASSED_ON" ] || break
done
if [ -n "$OUT_OF_TIME" ] && [ "$STATUS" = 0 ]; then
    # One task of an array has the number of the array, which stands for all of its tasks.
    TASK=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
    scontrol requeue "${TASK:-$SLURM_JOB_ID}"
fi
exit "$STATUS"
