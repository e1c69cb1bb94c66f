# SPDX-License-Identifier: Apache-2.0
"""A stage: a root of its own over another, with NVIDIA's nodes in /dev and a user alice.

Each call is one set of namespaces over an overlay in memory, and gone with the command: nothing
that is mounted, written or made there is on the host. User namespaces need a root that was pivoted
to (a chroot is refused them). Behind the nodes is no driver: to open one is ENXIO where that is
allowed.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

ALICE: Final = 3001
MAJOR, CAPS_MAJOR = 195, 240  # nvidia-caps has whatever the kernel gave it
_SECONDS: Final = 180.0
PATH: Final = "/usr/sbin:/usr/bin:/sbin:/bin"
_PLAIN: Final = "null:1:3 zero:1:5 full:1:7 random:1:8 urandom:1:9 tty:5:0 fuse:10:229"

# "$1" the root below, "$2" a folder for mounts, "$3" NAME:MAJOR:MINOR ..., "$4" HOST:HERE ... of
# what is seen here too; what follows is the command.
_SCRIPT: Final = r"""
set -eu
root=$1 m=$2/root nodes=$3 shared=$4; shift 4
mount -t tmpfs -o mode=755 gpulock-stage "$m"
mkdir "$m/u" "$m/w" "$m/m"
mount -t overlay -o "lowerdir=$root,upperdir=$m/u,workdir=$m/w" overlay "$m/m"
m=$m/m
mount -t proc proc "$m/proc"
mount --rbind /sys "$m/sys"
mount -t tmpfs -o mode=755 tmpfs "$m/run"
mount -t tmpfs -o mode=755 tmpfs "$m/dev"
mkdir "$m/dev/pts" "$m/dev/shm" "$m/dev/mqueue" "$m/dev/nvidia-caps" "$m/run/lock"
for node in $nodes; do
    path=${node%%:*} number=${node#*:}
    mknod -m 666 "$m/dev/$path" c "${number%:*}" "${number#*:}"
done
mount -t devpts -o newinstance,ptmxmode=0666 devpts "$m/dev/pts"
mount -t mqueue mqueue "$m/dev/mqueue"
mount -t tmpfs -o mode=1777 tmpfs "$m/dev/shm"
ln -s pts/ptmx "$m/dev/ptmx"
ln -s /proc/self/fd "$m/dev/fd"
for n in 0:stdin 1:stdout 2:stderr; do ln -s "fd/${n%:*}" "$m/dev/${n#*:}"; done
printf 'root:x:0:0::/root:/bin/sh\nalice:x:3001:3001::/home/alice:/bin/sh\n' >"$m/etc/passwd"
printf 'root:x:0:\nalice:x:3001:\n' >"$m/etc/group"
echo 127.0.0.1 localhost >"$m/etc/hosts"
rm -f "$m/etc/localtime" "$m/etc/resolv.conf"
: >"$m/etc/localtime"
: >"$m/etc/resolv.conf"
mkdir -p "$m/home/alice"
chown 3001:3001 "$m/home/alice"
mkdir -p "$m/tmp" "$m/var/tmp"
chmod 1777 "$m/tmp" "$m/var/tmp"
for pair in $shared; do
    host=${pair%:*} here=${pair#*:}
    [ ! -d "$host" ] || mkdir -p "$m$here"
    mount --bind "$host" "$m$here"
done
cd "$m"
pivot_root . .
umount -l .
cd /
exec "$@"
"""


@dataclass(frozen=True)
class Stage:
    """Where commands are run: over `root`, with nodes, and `shared` folders of the host."""

    root: Path
    scratch: Path
    shared: tuple[Path, ...] = ()
    nodes: Mapping[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])

    def run(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        uid: int = ALICE,
        mounts: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command with exactly the environment given, and a home, to its end.

        `mounts` are further files or folders of the host, and where they are seen.
        """
        (self.scratch / "root").mkdir(parents=True, exist_ok=True)
        nodes = [_PLAIN, *(f"{name}:{a}:{b}" for name, (a, b) in self.nodes.items())]
        seen = {**{str(path): str(path) for path in self.shared}, **(mounts or {})}
        paths = " ".join(f"{host}:{here}" for host, here in seen.items())
        who = "alice" if uid else "root"
        home = {"HOME": f"/home/{who}" if uid else "/root", "USER": who, "LC_ALL": "C.UTF-8"}
        given = {"PATH": PATH, **home, **(env or {})}
        ids = [f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]
        return subprocess.run(
            [
                *("unshare", "-m", "-p", "-n", "-f", "--kill-child", "--propagation", "private"),
                *("sh", "-c", _SCRIPT, "stage", str(self.root), str(self.scratch)),
                *(" ".join(nodes), paths, "setpriv", *ids, *command),
            ],
            env=given,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="surrogateescape",
            timeout=_SECONDS,
            check=False,
            cwd="/",
        )
