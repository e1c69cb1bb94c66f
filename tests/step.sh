#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Usage: tests/step.sh NAME COMMAND...
# Runs one step of a make target and prints one line: its name, its time, its last word. What it wrote is shown when it
# fails; under CI it is shown as it comes.
set -uo pipefail
name=$1
shift

started=${EPOCHREALTIME//[.,]/}
if [[ ${CI:-} == true ]]; then
    printf '== %s\n' "$name"
    "$@" </dev/null
    status=$?
    last=''
else
    [[ -t 1 ]] && printf '%-13s ...\r' "$name"
    log=$(mktemp)
    trap 'rm -f "$log"' EXIT
    "$@" </dev/null >"$log" 2>&1
    status=$?
    last=$(tail -n 1 "$log")
fi
tenths=$(((${EPOCHREALTIME//[.,]/} - started) / 100000))
printf -v seconds '%d.%d' $((tenths / 10)) $((tenths % 10))

if ((status == 0)); then
    printf '%-13s %6s s  %s\n' "$name" "$seconds" "${last:-ok}"
else
    printf '%-13s %6s s  FAILED\n' "$name" "$seconds"
    [[ -z ${log:-} ]] || cat "$log"
fi
exit "$status"
