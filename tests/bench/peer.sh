#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# The bench's peer: a prolog as sites write it in shell. It asks qstat how many GPUs the job wants (here: reads qstat's
# answer from a file, which is kinder to it), tries the devices in random order, locks each by mkdir, and appends the
# mask to the job's environment file. Usage: peer.sh LOCK_DIR QSTAT_ANSWER GPUS
locks=$1 answer=$2 gpus=$3
wanted=$(sed -n 's/^hard resource_list:.*gpu=\([0-9][0-9]*\).*/\1/p' "$answer")
[ -n "$wanted" ] || exit 0
taken=0
mask=
for device in $(seq 0 $(expr "$gpus" - 1) | shuf); do
    if mkdir "$locks/gpu$device" 2>/dev/null; then
        mask="$mask $device"
        taken=$(expr $taken + 1)
        [ "$taken" -lt "$wanted" ] || break
    fi
done
[ "$taken" -eq "$wanted" ] || exit 100
mask=$(echo $mask | sed 's/ /,/g')
echo "CUDA_VISIBLE_DEVICES=$mask" >>environment
