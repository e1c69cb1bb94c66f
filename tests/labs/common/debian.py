# SPDX-License-Identifier: Apache-2.0
"""Debian's packages for whatever lab: what is missing is installed, and nothing is started."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Final

from tests.labs.sge.wait import LabError

POLICY: Final = Path("/usr/sbin/policy-rc.d")  # asked by invoke-rc.d before it starts a service
_LOCK: Final = Path("/run/lock/gpulock-labs-install")  # labs that run at the same time
_APT: Final = ("apt-get", "-qq", "-o", "DPkg::Lock::Timeout=300")
_SECONDS: Final = 900


def install(packages: Mapping[str, str], answers: str = "") -> bool:
    """Install packages whose program is missing; return whether anything was.

    `packages` has a program of each, or the path of a file of it, `answers` lines for debconf. They
    stay on the machine.
    """
    missing = [
        name
        for name, program in packages.items()
        if shutil.which(program) is None and not (program[0] == "/" and Path(program).exists())
    ]
    if not missing:
        return False
    if os.geteuid() != 0:
        raise LabError(f"not root, and missing: {' '.join(missing)}")
    _LOCK.parent.mkdir(parents=True, exist_ok=True)
    with open(_LOCK, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with nothing_started():
            if not any(Path("/var/lib/apt/lists").glob("*Packages*")):
                run([*_APT, "update"])
            if answers:
                run(["debconf-set-selections"], answers)
            run([*_APT, "install", "-y", "--no-install-recommends", *missing])
    return True


@contextlib.contextmanager
def nothing_started() -> Generator[None]:
    """Let no package start its service; one's own policy stays as it is."""
    if POLICY.exists():
        yield
        return
    POLICY.write_text("#!/bin/sh\nexit 101\n")
    POLICY.chmod(0o755)
    try:
        yield
    finally:
        POLICY.unlink()


def run(command: Sequence[str], stdin: str = "") -> None:
    """Run one of Debian's programs; it asks nobody anything."""
    # in runlevel 1 invoke-rc.d starts nothing either
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    done = subprocess.run(
        command, env=env, input=stdin, capture_output=True, text=True, check=False, timeout=_SECONDS
    )
    if done.returncode != 0:
        raise LabError(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
