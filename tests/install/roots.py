# SPDX-License-Identifier: Apache-2.0
"""Machines to install packages on: throw-away copies of the private root that a test is in."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
_ENV: Final = {
    "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LC_ALL": "C.UTF-8",
    "DEBIAN_FRONTEND": "noninteractive",
}
# What a lab of this machine has just left there is none of the test's.
_OWN: Final = "var/lib/gpulock etc/gpulock usr/lib/gpulock run/gpulock"
_ENTER: Final = """
set -e
top=$1 packages=$2 script=$3
mount -t overlay overlay -o "lowerdir=/,upperdir=$top/upper,workdir=$top/work" "$top/root"
cd "$top/root"
mount -t proc proc proc
mount --rbind /dev dev
mount --bind "$top/run" run
mount --bind "$packages" mnt
chroot . /bin/bash -e -c "$script"
exit $?
"""
# A root of another machine. binfmt_misc(5) of a user namespace of its own names QEMU for it, and
# nothing outside.
_EMULATE: Final = r"""
set -e
top=$1
mount -t proc proc /proc
mount -t overlay overlay -o "lowerdir=/srv/arm64,upperdir=$top/upper,workdir=$top/work" "$top/root"
inner='
until [ "$(id -u)" = 0 ]; do sleep 0.05; done
mount -t binfmt_misc none /proc/sys/fs/binfmt_misc
head="\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00"
mask="\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff"
printf %s ":arm64:M::$head:$mask:/usr/bin/qemu-aarch64-static:F" >/proc/sys/fs/binfmt_misc/register
cd "$1/root"
mount -t proc proc proc
mount --rbind /dev dev
mount --bind "$1/run" run
mount --bind "$2" mnt
chroot . /bin/bash -e -c "$3"
exit $?
'
unshare --user --mount --pid --fork --kill-child sh -e -c "$inner" enter "$@" &
until [ "$(readlink /proc/$!/ns/user)" != "$(readlink /proc/self/ns/user)" ]; do sleep 0.05; done
echo "0 0 4294967295" >/proc/$!/uid_map
echo "0 0 4294967295" >/proc/$!/gid_map
wait $!
"""


def copy_demo(folder: Path, *more: str) -> None:
    """Copy the demo into a folder, to be run there on a gpulock that is installed."""
    for part in ("demo", "support", *more):
        leave = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "tests" / part, folder / "tests" / part, ignore=leave)


class Machine:
    """A machine for one test, with the packages at /mnt; what is written there stays."""

    enter = _ENTER

    def __init__(self, top: Path, packages: Path) -> None:
        self._words = [str(top), str(packages)]
        for name in ("upper", "work", "root", "run"):
            (top / name).mkdir()
        self.run(f"rm -rf {_OWN}")

    def run(self, script: str, status: int = 0, seconds: float = 300) -> str:
        """Run a script of bash until a command fails; return all that it printed."""
        unshare = ("unshare", "--mount", "--pid", "--net", "--fork", "--kill-child")
        done = subprocess.run(
            [
                *unshare,
                "--propagation=private",
                "bash",
                "-c",
                self.enter,
                "enter",
                *self._words,
                script,
            ],
            env=_ENV,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=seconds,
        )
        assert done.returncode == status, done.stdout
        return done.stdout


class EmulatedMachine(Machine):
    """Likewise an arm64 machine, whose programs QEMU plays."""

    enter = _EMULATE
