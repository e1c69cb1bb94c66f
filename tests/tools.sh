#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Usage: tests/tools.sh TARGET
# Says in one sentence which programs the tests lack here.
set -euo pipefail
missing=()
for program in gcc strace; do
    command -v "$program" >/dev/null || missing+=("$program")
done
if command -v gcc >/dev/null && ! gcc -E -x c - <<<'#include <stdio.h>' >/dev/null 2>&1; then
    missing+=(libc6-dev)
fi
((${#missing[@]} == 0)) && exit
printf '%s needs %s: apt-get install gcc libc6-dev strace, or dnf install gcc glibc-devel strace\n' "$1" "${missing[*]}" >&2
exit 1
