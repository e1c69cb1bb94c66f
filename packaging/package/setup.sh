#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Chooses the newest Python of this machine for gpulock: at each installation, and when one comes or goes.
# The hooks of a scheduler name their Python. Where that is gone they are rendered again; no scheduler is asked.
set -eu
home=/usr/lib/gpulock
oldest=9 newest=20 # for each there is a folder below lib/

# Debian's python3-minimal has no ctypes.
fits() {
    [ -x "$1" ] && "$1" -IS -c 'import ctypes, ssl' 2>/dev/null
}

find_python() {
    minor=$newest
    while [ "$minor" -ge "$oldest" ]; do
        python=/usr/bin/python3.$minor
        if fits "$python"; then
            # The distribution's own name outlives its next upgrade.
            [ "$(readlink -f /usr/bin/python3)" != "$(readlink -f "$python")" ] || python=/usr/bin/python3
            echo "$python"
            return
        fi
        minor=$((minor - 1))
    done
    echo "gpulock: no Python from 3.$oldest to 3.$newest in /usr/bin: install python3, then run $home/setup" >&2
    return 1
}

python=$(find_python)
ln -sfn "$python" "$home/bin/python3.new"
mv -fT "$home/bin/python3.new" "$home/bin/python3"
# Byte code of another version of gpulock may bear the same time.
find "$home/lib/python" -name __pycache__ -prune -exec rm -rf {} +
"$home/bin/python3" -I -m compileall -q "$home/lib/python/site-packages"
"$home/bin/gpulock" install hooks --if-broken ||
    echo "gpulock: the hooks were not rendered again: run gpulock doctor" >&2
