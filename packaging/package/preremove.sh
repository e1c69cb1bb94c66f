#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# dpkg: remove, upgrade...; rpm: 0 for a removal. Jobs do without this package, but nothing then frees a dead job's GPUs,
# and nothing can uninstall the hooks. So a removal waits for the administrator.
set -e
case ${1:-} in
remove | 0) ;;
*) exit 0 ;;
esac
if [ "${GPULOCK_REMOVE:-}" != anyway ]; then
    system=
    [ ! -e /var/lib/gpulock/sge-map ] || system=sge
    [ ! -e /var/lib/gpulock/slurm-map ] || system=slurm
    for unit in gpulockd.service gpulock-exporter.service; do
        [ ! -e "/etc/systemd/system/multi-user.target.wants/$unit" ] || system=systemd
    done
    if [ -n "$system" ]; then
        echo "gpulock: it is installed into $system here: run gpulock uninstall $system first," \
            "or set GPULOCK_REMOVE=anyway" >&2
        exit 1
    fi
    if [ -n "$(ls /run/gpulock/locks 2>/dev/null; ls /run/gpulock.claims/claims 2>/dev/null)" ]; then
        echo "gpulock: GPUs are held on this node (gpulock status): wait, or set GPULOCK_REMOVE=anyway" >&2
        exit 1
    fi
fi
find /usr/lib/gpulock/python -name __pycache__ -prune -exec rm -rf {} +
