#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Usage: tests/root/cell.sh ARGUMENT...
# A Python in a cell of the private root, for a worker of pytest-xdist: the processes, networks, cgroups and files of
# other cells, but for the checkout's, are none of its business.
set -euo pipefail
source /checkout/tests/root/cgroups.sh
enter_cgroups "cell-$$"
# shellcheck disable=SC2016 # it is the inner shell's
exec unshare --mount --propagation private --pid --fork --kill-child --mount-proc --net --uts --ipc --cgroup bash -c '
set -euo pipefail
source /checkout/tests/root/cgroups.sh
umount -R /sys/fs/cgroup
mount_cgroups /sys/fs/cgroup
mount -t tmpfs -o mode=1777 tmpfs /tmp
mkdir -m 755 /tmp/pytest # of the first process, which tells each worker its folder below
# Copies: a lab lays an overlay above them, and one may lie above another once.
mkdir -m 755 /tmp/.cell
for tree in etc var; do
    cp -a "/$tree" /tmp/.cell
    mount --bind "/tmp/.cell/$tree" "/$tree"
done
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -m 1777 /run/lock
mkdir /run/mount
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
ip link set lo up
if [[ -e /sys/fs/cgroup/lab ]]; then echo 0 >/sys/fs/cgroup/lab/cgroup.procs; fi
python "$@"
exit $?
' cell "$@"
