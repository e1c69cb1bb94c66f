#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Usage: tests/together.sh COMMAND COMMAND...
# Runs commands at the same time, prints what each wrote when all are over, and fails where one did.
set -uo pipefail

logs=$(mktemp -d)
pids=()
# a lab is taken down by what put it up: pass the signal on, and wait
trap 'kill -INT "${pids[@]}" 2>/dev/null; wait; rm -rf "$logs"; exit 130' INT TERM
for command in "$@"; do
    log="$logs/${#pids[@]}"
    bash -c "exec $command" </dev/null >"$log" 2>&1 &
    pids+=($!)
done
failed=0
words=()
for number in "${!pids[@]}"; do
    wait "${pids[number]}" || failed=$?
done
for number in "${!pids[@]}"; do
    cat "$logs/$number"
    words+=("$(tail -n 1 "$logs/$number")")
done
rm -rf "$logs"
printf -v line '%s; ' "${words[@]}"
echo "${line%; }"
exit "$failed"
