#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Usage: tests/release.sh RELEASE COMMAND...
# Runs a command in a Debian root of another release, as root: its Python, and that of trixie and sid has Slurm. /proc,
# /dev, /sys, /tmp and this checkout are the machine's own, and so are the third-party modules of .venv (those in C need
# the stable ABI). Nothing else is written: the root is read-only, and /run is the command's alone.
# CGROUPS=2: a tree of cgroup version 2 alone is mounted, a part of the machine's own.
# SHOWN="/etc/ssl /etc/pip.conf": places of the machine that the command sees too, and cannot change.
# GPULOCK_ROOTS is where the roots are made, once each, from the mirror of this machine's apt.
set -euo pipefail
release=$1
shift
checkout=$(pwd -P)
roots=${GPULOCK_ROOTS:-/var/cache/gpulock-roots}
packages=slurmctld,slurmd,slurm-client,libpam-slurm-adopt,munge,iproute2,procps,mount,strace,gcc,libc6-dev,libslurm-dev,libcap-dev,libbsd-dev,python3,make
# of slurmd under systemd, which it asks by D-Bus
packages+=,systemd,dbus
# of the test with containers
packages+=,bubblewrap,busybox-static,charliecloud-runtime,mmdebstrap,podman,runc,fuse2fs,fuse3,squashfuse,squashfs-tools
packages+=,openssl # of unit tests
mirror=()
case $release in
bullseye | bookworm) # for their Python alone
    packages=python3,python3-distutils,gcc,libc6-dev,strace,procps,iproute2,mount,make,openssl
    # There may be no mirror of its -security: this machine's own archive alone.
    mapfile -t mirror < <(.venv/bin/python tests/support/mirror.py)
    ;;
esac
root=$roots/$release

die() {
    echo "$*" >&2
    exit 1
}

make_root() {
    # A mirror may be behind; its signature counts all the same.
    # It mounts: what looks at the mounts of this machine meanwhile is to see none.
    rm -rf "$root.new"
    unshare --mount --propagation private nice mmdebstrap --quiet --mode=root --variant=apt --include="$packages" \
        --aptopt='Acquire::Check-Valid-Until "false"' "$release" "$root.new" "${mirror[@]}" >&2 || return
    # Beside /usr, over which a test lays another.
    mkdir "$root.new/srv/modules"
    [[ $packages != *slurmd* ]] || .venv/bin/python -m tests.support.contrib "$release" slurm-wlm-nvml-plugin \
        "$root.new/srv/slurm-nvml" || echo "$0: without Slurm's plugin for NVML: its test fails" >&2
    pth=$(echo "$root.new"/usr/local/lib/python3.*/dist-packages)/modules.pth
    echo 'import site; site.addsitedir("/srv/modules")' >"$pth"
    echo "$recipe" >"$root.new/.recipe"
    rm -rf "$root"
    mv "$root.new" "$root"
}

recipe="$packages $(declare -f make_root)"

mkdir -p "$roots"
exec 9>"$roots/$release.lock"
flock 9 # who runs in the root shares this lock
# sid moves: what is a week old is another Slurm.
if [[ $(cat "$root/.recipe" 2>/dev/null) != "$recipe" || ($release == sid && $(find "$root/.recipe" -mtime +7)) ]]; then
    command -v mmdebstrap >/dev/null || die "$0 needs mmdebstrap: apt-get install mmdebstrap"
    # A mirror fails now and then, for some seconds.
    make_root || { sleep 30 && make_root; } || die "$0: no root of Debian $release could be made"
fi
mkdir -p "$root$checkout"
for place in ${SHOWN:-}; do
    mkdir -p "$root${place%/*}"
    if [[ -d $place ]]; then mkdir -p "$root$place"; else touch "$root$place"; fi
done
flock -s 9

# The root has no git: the older release of the labs' upgrade goes there as an archive. Where there is none, they say so.
mkdir -p build
if .venv/bin/python tests/labs/older.py build/older.tar.$$ 2>/dev/null; then
    mv build/older.tar.$$ build/older.tar
    export GPULOCK_OLDER=$checkout/build/older.tar
fi
modules=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
# shellcheck disable=SC2016 # it is the inner shell's
inner='
set -eu
root=$1 checkout=$2 modules=$3
shift 3
mount --bind "$root" "$root"
mount -o remount,bind,ro "$root"
for tree in dev sys tmp var/tmp; do mount --rbind "/$tree" "$root/$tree"; done
if [ "${CGROUPS:-}" = 2 ]; then
    mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
    # slurmd empties the cgroup of PID 1, and fails where one ends in there meanwhile.
    mkdir "$root/sys/fs/cgroup/init" "$root/sys/fs/cgroup/lab"
    echo 0 >"$root/sys/fs/cgroup/init/cgroup.procs"
fi
mount -t tmpfs -o mode=755 tmpfs "$root/run"
mkdir -m 1777 "$root/run/lock"
mkdir "$root/run/mount" # as the first mount(8) would
mount -t proc proc "$root/proc"
mount --rbind "$checkout" "$root$checkout"
for place in ${SHOWN:-}; do # of which a package of the root would write the certificates anew
    mount --bind "$place" "$root$place"
    mount -o remount,bind,ro "$root$place"
done
mount --bind "$modules" "$root/srv/modules"
cd "$root"
pivot_root . .
umount -l .
cd "$checkout"
( [ "${CGROUPS:-}" != 2 ] || echo 0 >/sys/fs/cgroup/lab/cgroup.procs; exec "$@")
exit $? # or the shell would become that command, and PID 1 has orphans to reap
'
run=(bash -c "$inner" release "$root" "$checkout" "$modules" "$@")
if [[ ${CGROUPS:-} == 2 ]]; then
    group=/sys/fs/cgroup
    [[ -e $group/cgroup.controllers ]] || group+=/unified
    group+=/gpulock-release-$$
    mkdir "$group"
    trap 'find "$group" -depth -type d -exec rmdir {} +' EXIT
    # Once in its PID namespace: slurmd wants no process in there that it does not see.
    # shellcheck disable=SC2016 # it is the inner shell's
    run=(bash -c 'echo 0 >"$1/cgroup.procs" && shift && exec unshare --cgroup "$@"' release "$group" "${run[@]}")
fi
unshare --mount --pid --fork --kill-child --propagation private "${run[@]}" 9>&-
