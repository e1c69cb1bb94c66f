# SPDX-License-Identifier: Apache-2.0
"""Machines to install packages on: roots of Debian, of which a test sees a throw-away copy.

This machine's own root serves as well. What a test writes goes to a folder above the root.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
from pathlib import Path
from typing import Final

from tests.support.mirror import mirror_arguments

HOST: Final = "host"
RPM: Final = "rpm"  # Debian with the package managers of Fedora
ROOTS: Final = Path(os.environ.get("GPULOCK_ROOTS", "/var/cache/gpulock-roots"))
_ENV: Final = {
    "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LC_ALL": "C.UTF-8",
    "DEBIAN_FRONTEND": "noninteractive",
}
# What a lab of this machine has just left there is none of the test's.
_OWN: Final = "var/lib/gpulock etc/gpulock usr/local/libexec/gpulock run/gpulock"
_ENTER: Final = """
set -e
lower=$1 top=$2 packages=$3 script=$4
mount -t overlay overlay -o "lowerdir=$lower,upperdir=$top/upper,workdir=$top/work" "$top/root"
cd "$top/root"
mount -t proc proc proc
mount --rbind /dev dev
mount --bind "$top/run" run
mount --bind "$packages" mnt
chroot . /bin/bash -e -c "$script"
exit $?
"""


class Machine:
    """A machine for one test, with the packages at /mnt; what is written there stays."""

    def __init__(self, lower: Path, top: Path, packages: Path) -> None:
        self._words = [str(lower), str(top), str(packages)]
        for name in ("upper", "work", "root", "run"):
            (top / name).mkdir()
        self.run(f"rm -rf {_OWN}")

    def run(self, script: str, status: int = 0) -> str:
        """Run a script of bash until a command fails; return all that it printed."""
        unshare = ("unshare", "--mount", "--pid", "--net", "--fork", "--kill-child")
        done = subprocess.run(
            [
                *unshare,
                "--propagation=private",
                "bash",
                "-c",
                _ENTER,
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
            timeout=300,
        )
        assert done.returncode == status, done.stdout
        return done.stdout


def find_root(name: str) -> Path:
    """Return a root, made at its first use: this machine's, a release's, or that with rpm."""
    if name == HOST:
        return Path("/")
    root = ROOTS / f"packages-{name}"
    ROOTS.mkdir(parents=True, exist_ok=True)
    with (ROOTS / f"packages-{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not root.is_dir():
            include = "python3,rpm,dnf" if name == RPM else "python3"
            made = root.with_suffix(".new")
            subprocess.run(["rm", "-rf", str(made)], check=True)
            command = ["mmdebstrap", "--quiet", "--mode=root", "--variant=apt"]
            valid = "--aptopt=Acquire::Check-Valid-Until false"  # a mirror may be behind
            release = "bookworm" if name == RPM else name
            mirror = mirror_arguments() if name == "bullseye" else []  # it has no -security there
            command += [valid, f"--include={include}", release, str(made), *mirror]
            subprocess.run(["unshare", "--mount", "--propagation=private", *command], check=True)
            made.rename(root)
    return root
