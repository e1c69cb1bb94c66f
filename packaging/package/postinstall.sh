#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# dpkg: configure, triggered (another /usr/bin/python3), or abort-*; rpm: the number of versions there are now.
set -e
library=/usr/lib/gpulock/python
case ${1:-} in abort-*) exit 0 ;; esac
if ! /usr/bin/python3 -I -c 'import ctypes, psutil, ssl, sys; assert sys.version_info >= (3, 9)' 2>/dev/null; then
    echo "gpulock: /usr/bin/python3 is no Python 3.9 or later with ctypes, psutil and ssl" >&2
    [ "${1:-}" = triggered ] || exit 1 # an upgrade of Python may go on
    exit 0
fi
# As sysusers.d and tmpfiles.d do it at the next boot, where there is systemd.
if command -v systemd-sysusers >/dev/null; then
    systemd-sysusers gpulock.conf || true
elif ! getent passwd gpulock-exporter >/dev/null; then
    useradd --system --user-group --home-dir / --shell /usr/sbin/nologin gpulock-exporter || true
fi
for folder in /run/gpulock /run/gpulock.claims /var/lib/gpulock; do
    [ -d "$folder" ] || install -d -m 755 "$folder"
done
# Byte code of another version of gpulock may bear the same time.
find "$library" -name __pycache__ -prune -exec rm -rf {} +
/usr/bin/python3 -I -m compileall -q "$library"
# Installed hooks are copies: new ones are tried, and only then put in force.
/usr/bin/gpulock install hooks ||
    echo "gpulock: the hooks of the version before stay in force: run gpulock doctor" >&2
if [ -d /run/systemd/system ]; then
    systemctl daemon-reload && systemctl try-restart gpulockd.service gpulock-exporter.service ||
        echo "gpulock: a service did not start again: run gpulock doctor" >&2
fi
