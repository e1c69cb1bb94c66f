#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Usage: tests/root/enter.sh ROOT COMMAND...
# Runs a command as root in a private root of tests/root/packages.py, with this checkout at /checkout; nothing of it is left
# on the machine.
# Its own mount, pid, network, uts, ipc and cgroup namespaces and, in each hierarchy that can be written, a cgroup of its
# own. The root is an overlay in memory over the layers: what the command writes there is gone afterwards.
# CGROUPS=2: version 2 alone, also where this machine mounts version 1.  UPTIME=30: it was booted 30 seconds ago.
# NETWORK=host: it has this machine's network, and its way to a package index.
# PIDS=host: it sees this machine's processes, as programs of the kernel do.
# GPULOCK_SHOWN="/opt/ocs": folders of the machine that the command sees too. All GPULOCK_ variables are handed on.
set -euo pipefail
checkout=$(readlink -f "${BASH_SOURCE[0]%/*}/../..")
# shellcheck source=tests/root/cgroups.sh
source "$checkout/tests/root/cgroups.sh"
refuse_chroot
layers=$(cd "$checkout" && python3 -m tests.root.build "$1")
shift
enter_cgroups "gpulock-tests-$$"
trap leave_cgroups EXIT

# shellcheck disable=SC2016 # it is the inner shell's
inner='
set -euo pipefail
layers=$1 checkout=$2
shift 2
source "$checkout/tests/root/cgroups.sh"
base=${layers##*:}/mnt
mount -t tmpfs -o size=75%,mode=755 gpulock-tests "$base"
mkdir "$base/up" "$base/work" "$base/new"
new=$base/new
mount -t overlay overlay -o "lowerdir=$layers,upperdir=$base/up,workdir=$base/work" "$new"
mount -t proc proc "$new/proc"
mount -t sysfs sysfs "$new/sys" 2>/dev/null || mount --rbind /sys "$new/sys"
mount_cgroups "$new/sys/fs/cgroup"
mount -t tmpfs -o mode=755 tmpfs "$new/dev"
mkdir "$new/dev/pts" "$new/dev/shm"
for one in null:3 zero:5 full:7 random:8 urandom:9; do mknod -m 666 "$new/dev/${one%:*}" c 1 "${one#*:}"; done
mknod -m 666 "$new/dev/tty" c 5 0
[[ ! -e /dev/kmsg ]] || mknod -m 644 "$new/dev/kmsg" c 1 11
[[ ! -e /dev/fuse ]] || mknod -m 666 "$new/dev/fuse" c 10 229
ln -s pts/ptmx "$new/dev/ptmx"
ln -s /proc/self/fd "$new/dev/fd"
for one in stdin:0 stdout:1 stderr:2; do ln -s "/proc/self/fd/${one#*:}" "$new/dev/${one%:*}"; done
mount -t devpts -o newinstance,ptmxmode=666,mode=620 devpts "$new/dev/pts"
mount -t tmpfs -o mode=1777 tmpfs "$new/dev/shm"
mount -t tmpfs -o mode=1777 tmpfs "$new/tmp"
mount -t tmpfs -o mode=755 tmpfs "$new/run"
mkdir -m 1777 "$new/run/lock"
mkdir "$new/run/mount" # as the first mount(8) would
mkdir -p "$new/checkout"
mount --rbind "$checkout" "$new/checkout"
for shown in ${GPULOCK_SHOWN:-}; do
    [[ -e $shown ]] || continue
    mkdir -p "$new${shown%/*}"
    if [[ -d $shown ]]; then mkdir -p "$new$shown"; else touch "$new$shown"; fi
    mount --rbind "$shown" "$new$shown"
done
[[ $layers != *:* ]] || chroot "$new" /sbin/ldconfig
cd "$new"
mkdir .old
pivot_root . .old
umount -l /.old
rmdir /.old
cd /checkout
ip link set lo up
hostname gpulock-tests
if [[ -e /sys/fs/cgroup/lab ]]; then echo 0 >/sys/fs/cgroup/lab/cgroup.procs; fi
env --default-signal=INT,TERM "$@" # which the unshare of util-linux 2.36 leaves ignored
exit $? # or the shell would become that command, and PID 1 has orphans to reap
'
pids=(--pid)
[[ ${PIDS:-} != host ]] || pids=()
time=()
if [[ -n ${UPTIME:-} ]]; then
    read -r uptime _ </proc/uptime
    offset=$((UPTIME - ${uptime%.*}))
    time=(--time --boottime "$offset" --monotonic "$offset")
fi
net=(--net)
if [[ ${NETWORK:-} == host ]]; then
    net=()
    GPULOCK_SHOWN="${GPULOCK_SHOWN:-} $(cd "$checkout" && python3 -m tests.root.build index-files)"
fi
path=/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
kept=()
for name in TERM CGROUPS SSL_CERT_FILE ${!PIP_*} ${!GPULOCK_*}; do [[ -z ${!name:-} ]] || kept+=("$name=${!name}"); done
env -i "${kept[@]}" LC_ALL=C.UTF-8 HOME=/root USER=root LOGNAME=root SHELL=/bin/bash PATH=$path \
    unshare --mount --propagation private --fork --kill-child --uts --ipc --cgroup "${pids[@]}" "${net[@]}" "${time[@]}" \
    bash -c "$inner" enter "$layers" "$checkout" "$@"
