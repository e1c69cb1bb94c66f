#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Usage: tests/memory.sh [COMMAND...]
# Prints the folder in memory where unit tests may keep their files, nothing where there is no room
# or programs may not run there. On a disk they wait for fsync(2) most of the time.
# With a command: runs it so, and takes away its files where it succeeds. pytest needs ten times as long for that.
set -euo pipefail
room=$(df --output=avail -k /dev/shm 2>/dev/null | tail -n 1) || room=0
options=$(awk '$2 == "/dev/shm" { print $4 }' /proc/mounts)
memory=
[[ -w /dev/shm && ${room:-0} -gt 2000000 && ,$options, != *,noexec,* ]] && memory=/dev/shm
if (($# == 0)); then
    printf '%s' "${memory:+$memory$'\n'}"
    exit 0
fi
[[ -n $memory ]] || exec "$@"

# What a failure or a kill left behind goes when it is an hour old.
find "$memory" -mindepth 1 -maxdepth 1 -name 'u.*' -user "$(id -u)" -mmin +60 -exec rm -rf {} + 2>/dev/null || true
PYTEST_DEBUG_TEMPROOT=$(mktemp -d "$memory/u.XXXXXX")
export PYTEST_DEBUG_TEMPROOT
chmod 755 "$PYTEST_DEBUG_TEMPROOT"
status=0
"$@" || status=$?
if ((status == 0)) && ! rm -rf "$PYTEST_DEBUG_TEMPROOT" 2>/dev/null; then
    chmod -R u+rwX "$PYTEST_DEBUG_TEMPROOT" && rm -rf "$PYTEST_DEBUG_TEMPROOT" || true
fi
exit "$status"
