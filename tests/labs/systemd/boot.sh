#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Usage: systemd_boot.sh FOLDER MODE [SOURCE:TARGET...]
# Runs as PID 1 of new pid, mount, network, uts, ipc and cgroup namespaces, and becomes systemd. Its
# root is this machine's own, read-only below a throw-away layer in memory. MODE is `unified`
# (cgroup v2 alone) or `hybrid` (v1 controllers, v2 to track processes).
set -euo pipefail
folder=$1 mode=$2
shift 2
root=$folder/root

mount --make-rprivate /
mount -t tmpfs -o size=1g gpulock-lab "$folder/over"
mkdir "$folder/over/up" "$folder/over/work"
mount -t overlay -o "lowerdir=/,upperdir=$folder/over/up,workdir=$folder/over/work" overlay "$root"
: >"$root/etc/fstab"
: >"$root/etc/machine-id"
echo gpulock-lab >"$root/etc/hostname"
mkdir -p "$root/etc/systemd/system" "$root/etc/gpulock"
rm -rf "$root"/etc/systemd/system/*.wants "$root/var/log/journal" "$root/var/lib/gpulock"

mount -t proc -o nosuid,nodev,noexec proc "$root/proc"
# systemd-sysctl and PID 1 would set the fs.* and kernel.* of the machine we are a guest of.
for name in sys sysrq-trigger irq bus fs; do
    [[ -e $root/proc/$name ]] || continue
    mount --bind "$root/proc/$name" "$root/proc/$name"
    mount -o remount,bind,ro,nosuid,nodev,noexec "$root/proc/$name"
done
mount -t sysfs -o ro,nosuid,nodev,noexec sysfs "$root/sys"

mount -t tmpfs -o mode=755,nosuid tmpfs "$root/dev"
mkdir "$root/dev/pts" "$root/dev/shm" "$root/dev/mqueue"
node() { mknod -m "$1" "$root/dev/$2" c "$3" "$4"; }
node 666 null 1 3
node 666 zero 1 5
node 666 full 1 7
node 666 random 1 8
node 666 urandom 1 9
node 666 tty 5 0
node 644 kmsg 1 11
# An inode of its own: getty and PID 1 change the mode of their console.
node 600 console 1 3
mount -t devpts -o newinstance,ptmxmode=0666,mode=620,gid=5 devpts "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
mount -t tmpfs -o mode=1777,nosuid,nodev tmpfs "$root/dev/shm"
mount -t tmpfs -o mode=755,nosuid,nodev tmpfs "$root/run"

groups=$root/sys/fs/cgroup
if [[ $mode == unified ]]; then
    mount -t cgroup2 cgroup2 "$groups"
else
    mount -t tmpfs -o mode=755 tmpfs "$groups"
    mkdir "$groups/unified"
    mount -t cgroup2 cgroup2 "$groups/unified"
    for name in systemd devices memory pids cpu cpuacct freezer blkio; do
        [[ -d /sys/fs/cgroup/$name ]] || continue
        mkdir "$groups/$name"
        controller=$name
        [[ $name != systemd ]] || controller=none,name=systemd
        mount -t cgroup -o "$controller" cgroup "$groups/$name"
    done
fi

for pair in "$@"; do
    mkdir -p "$root${pair#*:}"
    mount --bind "${pair%%:*}" "$root${pair#*:}"
    # Where it lies on the host is not to count: that may be below /tmp.
    [[ ! -d $root${pair%%:*} ]] || mount -t tmpfs -o ro tmpfs "$root${pair%%:*}"
done
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"

cd "$root"
# The system call: pivot_root(8) is in a package of its own since util-linux 2.42.
python3 -IS -c 'import ctypes, sys; sys.exit(ctypes.CDLL(None).pivot_root(b".", b"."))'
umount -l .
cd /
mount --make-rshared /
# No clock, no modules, no keys of the machine's. It may read the kernel's log, as gpulockd does.
exec setpriv \
    --bounding-set=-sys_module,-sys_time,-sys_rawio,-wake_alarm,-block_suspend,-mac_admin,-mac_override \
    env -i container=gpulock-lab PATH=/usr/sbin:/usr/bin:/sbin:/bin \
    /lib/systemd/systemd --system --log-target=journal --show-status=no --unit=basic.target </dev/null
