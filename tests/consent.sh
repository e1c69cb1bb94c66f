#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Usage: tests/consent.sh TARGET
# Asks before a target that changes this machine. CI=true or GPULOCK_LAB_YES=1 is a yes given beforehand.
set -euo pipefail
target=$1

refuse() {
    printf '%s: %s\n' "$target" "$1" >&2
    exit 1
}

[[ $(id -u) == 0 ]] || refuse 'the labs run a real scheduler and need root; make test needs none.'
if [[ $target == 'make labs' ]] && ! setpriv --reuid 65534 --regid 65534 --clear-groups test -r tests; then
    refuse "tests run as other users, who cannot reach $PWD: move it, or run .ci/run, which tests a copy."
fi
[[ ${CI:-} != true && ${GPULOCK_LAB_YES:-} != 1 ]] || exit 0

cat >&2 <<TEXT
$target installs packages, adds test users and runs a real scheduler on this machine (loopback only).
The labs put back what they change, but packages stay. Not for a node that does real work.
TEXT
[[ -t 0 ]] || refuse 'nobody here to ask. Allow it with GPULOCK_LAB_YES=1.'
read -r -p 'Go on? [y/N] ' answer
[[ $answer == [yY] || $answer == [yY]es ]] || refuse 'not allowed; nothing was changed.'
