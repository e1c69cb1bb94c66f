#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Only `dpkg --purge` takes away the settings, the history, quarantines and reserves.
set -e
if [ "${1:-}" = purge ]; then
    rm -rf /var/lib/gpulock
    rm -f /etc/gpulock/gpulock.conf
    rmdir --ignore-fail-on-non-empty /etc/gpulock 2>/dev/null || true
fi
