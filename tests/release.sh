#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Usage: tests/release.sh RELEASE COMMAND...
# Runs a command in a Debian root of another release (trixie, sid), as root: its Python, its Slurm. /proc, /dev, /sys,
# /tmp and this checkout are the machine's own, and so are the third-party modules of .venv (those in C need the stable
# ABI). Nothing else is written: the root is read-only, and /run is the command's alone.
# GPULOCK_ROOTS is where the roots are made, once each, from the mirror of this machine's apt.
set -euo pipefail
release=$1
shift
checkout=$(pwd -P)
roots=${GPULOCK_ROOTS:-/var/cache/gpulock-roots}
packages=slurmctld,slurmd,slurm-client,munge,iproute2,procps,mount,strace,gcc,libc6-dev,libslurm-dev,libcap-dev,libbsd-dev,python3,make
# of the test with containers
packages+=,bubblewrap,busybox-static,charliecloud-runtime,mmdebstrap,podman,runc,fuse2fs,fuse3,squashfuse,squashfs-tools
root=$roots/$release

make_root() {
    command -v mmdebstrap >/dev/null || { echo "$0 needs mmdebstrap: apt-get install mmdebstrap" >&2; return 1; }
    # A mirror may be behind; its signature counts all the same.
    nice mmdebstrap --quiet --mode=root --variant=apt --include="$packages" \
        --aptopt='Acquire::Check-Valid-Until "false"' "$release" "$root.new" >&2
    mkdir -p "$(echo "$root.new"/usr/local/lib/python3.*/dist-packages)"
    echo "$packages" >"$root.new/.packages"
    rm -rf "$root"
    mv "$root.new" "$root"
}

mkdir -p "$roots"
{
    flock 9
    # sid moves: what is a week old is another Slurm.
    if [[ $(cat "$root/.packages" 2>/dev/null) != "$packages" || ($release == sid && $(find "$root/.packages" -mtime +7)) ]]; then
        rm -rf "$root.new"
        make_root
    fi
    mkdir -p "$root$checkout"
} 9>"$roots/.lock"

modules=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
# shellcheck disable=SC2016 # it is the inner shell's
inner='
set -eu
root=$1 checkout=$2 modules=$3
shift 3
mount --bind "$root" "$root"
mount -o remount,bind,ro "$root"
for tree in dev sys tmp var/tmp; do mount --rbind "/$tree" "$root/$tree"; done
mount -t tmpfs -o mode=755 tmpfs "$root/run"
mkdir -m 1777 "$root/run/lock"
mkdir "$root/run/mount" # as the first mount(8) would
mount -t proc proc "$root/proc"
mount --rbind "$checkout" "$root$checkout"
mount --bind "$modules" "$(echo "$root"/usr/local/lib/python3.*/dist-packages)"
cd "$root"
pivot_root . .
umount -l .
cd "$checkout"
"$@" # no exec: PID 1 has orphans to reap, and signals that it does not handle do not reach it
'
exec unshare --mount --pid --fork --kill-child --propagation private \
    bash -c "$inner" release "$root" "$checkout" "$modules" "$@"
