# SPDX-License-Identifier: Apache-2.0
"""Have Debian's Slurm and what the machines are made with installed, and nothing started."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

from tests.labs.sge_wait import LabError

_PACKAGES: Final = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "slurm-client": "sbatch",
    "munge": "munged",
    "iproute2": "ip",
    "util-linux": "nsenter",
}
_APT: Final = ("apt-get", "-qq", "-o", "DPkg::Lock::Timeout=300")


def install() -> bool:
    """Install what is missing; return whether anything was."""
    missing = [name for name, program in _PACKAGES.items() if shutil.which(program) is None]
    if not missing:
        return False
    if os.geteuid() != 0:
        raise LabError(f"not root, and missing: {' '.join(missing)}")
    # invoke-rc.d starts nothing in runlevel 1, and policy-rc.d is asked before it.
    policy = Path("/usr/sbin/policy-rc.d")
    ours = not policy.exists()
    if ours:
        policy.write_text("#!/bin/sh\nexit 101\n")
        policy.chmod(0o755)
    try:
        if not any(Path("/var/lib/apt/lists").glob("*Packages*")):
            _run([*_APT, "update"])
        _run([*_APT, "install", "-y", "--no-install-recommends", *missing])
    finally:
        if ours:
            policy.unlink()
    return True


def _run(command: list[str]) -> None:
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, check=False, timeout=900
    )
    if done.returncode != 0:
        raise LabError(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
