#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Usage: tests/booted.sh SECONDS COMMAND...
# Runs a command (as root) that sees a machine booted so many seconds ago: in a time namespace of its own.
set -euo pipefail
seconds=$1
shift
read -r uptime _ </proc/uptime
# Of this namespace, where it is one already: an offset counts from the machine's own clock.
earlier=$(awk '$1 == "boottime" { print $2 }' /proc/self/timens_offsets)
offset=$((seconds - (${uptime%.*} - earlier))) # backward or forward: the sum alone may not be negative
exec unshare --time --fork --kill-child --boottime "$offset" --monotonic "$offset" "$@"
