#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Only `dpkg --purge` takes away the history, quarantines and reserves.
set -e
if [ "${1:-}" = purge ]; then
    rm -rf /var/lib/gpulock
fi
