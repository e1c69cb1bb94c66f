#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Usage: tests/together.sh COMMAND COMMAND...
# Runs commands at the same time, prints what each wrote when all are over, and fails where one did. An interrupt is passed
# on to each, and waited for: a lab is taken down by what put it up.
set -uo pipefail
# Each command in a process group of its own. Without job control a shell's background ignores SIGINT, and so does all
# below it; and to one process it would be of no use: unshare(1) blocks it, the lab is below that.
set -m

logs=$(mktemp -d)
pids=()
# shellcheck disable=SC2317 # by the trap
interrupted() {
    trap '' INT TERM # impatience must not end a lab half taken down
    for pid in $(jobs -p); do # the last may not be in $pids yet
        kill -INT -- "-$pid" 2>/dev/null
    done
    wait
    rm -rf "$logs"
    exit 130
}
trap interrupted INT TERM
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
