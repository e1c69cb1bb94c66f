#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Usage: tests/booted.sh SECONDS COMMAND...
# Runs a command (as root) that sees a machine booted so many seconds ago: in a time namespace of its own.
set -euo pipefail
seconds=$1
shift
read -r uptime _ </proc/uptime
offset=$((seconds - ${uptime%.*})) # backward or forward: what counts is that the sum is not negative
exec unshare --time --fork --kill-child --boottime "$offset" --monotonic "$offset" "$@"
