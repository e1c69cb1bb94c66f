#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Only `dpkg --purge` takes away the settings, the history, quarantines and reserves.
set -e
[ "${1:-}" = purge ] || exit 0
if [ -e /var/lib/gpulock/sge-map ] || [ -e /var/lib/gpulock/slurm-map ]; then
    echo "gpulock: a scheduler may still start its hooks, which need /var/lib/gpulock and /etc/gpulock: both stay" >&2
    exit 0
fi
rm -rf /var/lib/gpulock /usr/lib/gpulock/hooks
rmdir --ignore-fail-on-non-empty /usr/lib/gpulock 2>/dev/null || true
rm -f /etc/gpulock/gpulock.conf
rmdir --ignore-fail-on-non-empty /etc/gpulock 2>/dev/null || true
