#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# The epilog to peer.sh: gives back what the job's environment names. Usage: peer_epilog.sh LOCK_DIR
mask=$(sed -n 's/^CUDA_VISIBLE_DEVICES=//p' environment | tail -n 1)
for device in $(echo "$mask" | sed 's/,/ /g'); do
    rmdir "$1/gpu$device"
done
