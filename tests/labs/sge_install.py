# SPDX-License-Identifier: Apache-2.0
"""Have Debian's Grid Engine and what the machines are made with installed, and nothing started."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

from tests.labs.sge_wait import LabError

_PACKAGES: Final = {
    "gridengine-master": "/usr/lib/gridengine/sge_qmaster",
    "gridengine-exec": "/usr/lib/gridengine/sge_execd",
    "gridengine-client": "/usr/lib/gridengine/qsub",
    "iproute2": "ip",
    "util-linux": "nsenter",
}
# No cell of the host's own: the lab brings its cell in its scratch folder.
_ANSWERS: Final = "gridengine-common shared/gridengineconfig boolean false\n"


def install() -> bool:
    """Install what is missing; return whether anything was."""
    missing = [name for name, program in _PACKAGES.items() if shutil.which(program) is None]
    if not missing:
        return False
    if os.geteuid() != 0:
        raise LabError(f"not root, and missing: {' '.join(missing)}")
    # invoke-rc.d starts nothing in runlevel 1, and policy-rc.d is asked before it.
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    policy = Path("/usr/sbin/policy-rc.d")
    ours = not policy.exists()
    if ours:
        policy.write_text("#!/bin/sh\nexit 101\n")
        policy.chmod(0o755)
    try:
        if not any(Path("/var/lib/apt/lists").glob("*Packages*")):
            _apt(["apt-get", "update", "-qq"], env)
        _apt(["debconf-set-selections"], env, _ANSWERS)
        install_them = ["apt-get", "install", "-y", "-qq", "--no-install-recommends"]
        _apt([*install_them, "-o", "DPkg::Lock::Timeout=300", *missing], env)
    finally:
        if ours:
            policy.unlink()
    return True


def _apt(command: list[str], env: dict[str, str], stdin: str = "") -> None:
    done = subprocess.run(
        command, env=env, input=stdin, capture_output=True, text=True, check=False, timeout=900
    )
    if done.returncode != 0:
        raise LabError(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
