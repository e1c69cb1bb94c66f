# SPDX-License-Identifier: Apache-2.0
"""Have Debian's container programs installed, and Apptainer, which Debian has in sid alone."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.labs.sge_wait import LabError

_PACKAGES: Final = {
    "bubblewrap": "bwrap",
    "busybox-static": "busybox",
    "charliecloud-runtime": "ch-run",
    "mmdebstrap": "mmdebstrap",
    "podman": "podman",
    "runc": "runc",
    "util-linux": "unshare",
}
_APT: Final = ("apt-get", "-qq", "-o", "DPkg::Lock::Timeout=300")
_APPLETS: Final = ("cat", "env", "id", "ls", "mknod", "sh", "true")
# Apptainer mounts images with the first, the stage starts programs with the second.
_WITH_APPTAINER: Final = ("fuse2fs", "fuse3", "squashfuse", "squashfs-tools")
_WITH_STAGE: Final = ("coreutils", "dash", "mount", "util-linux")
_FOLDERS: Final = ("home", "proc", "root", "run", "sys", "tmp", "var/tmp")
_SID: Final = Path(__file__).resolve().parents[2] / ".venv/.sid"


def install() -> None:
    """Install what is missing; packages stay."""
    missing = [name for name, program in _PACKAGES.items() if shutil.which(program) is None]
    if not missing:
        return
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


def make_image(folder: Path) -> Path:
    """Make the root of a small container: a shell and a few programs."""
    for name in ("bin", "dev", "etc", "home", "mnt/0", "proc", "sys", "tmp", "var/tmp"):
        (folder / name).mkdir(parents=True)
    busybox = shutil.which("busybox")
    assert busybox
    shutil.copy(busybox, folder / "bin/busybox")
    for name in _APPLETS:
        (folder / "bin" / name).symlink_to("busybox")
    for name in ("passwd", "group", "resolv.conf", "hosts", "localtime"):
        (folder / "etc" / name).touch()
    return folder


def sid() -> Path:
    """Return the root of a Debian sid with Apptainer: made once, for every lab of this checkout."""
    _SID.parent.mkdir(exist_ok=True)
    with open(f"{_SID}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # labs run at the same time
        if not _SID.exists():
            new = _SID.with_name(".sid.new")
            shutil.rmtree(new, ignore_errors=True)
            _make_sid(new)
            new.rename(_SID)
    return _SID


def _make_sid(folder: Path) -> None:
    """Make it below `folder`; no program of it is run meanwhile.

    Its maintainer scripts are left out: what sid breaks for a day is most often one of those.
    """
    late = '--aptopt=Acquire::Check-Valid-Until "false"'
    include = f"--include={','.join(('apptainer', *_WITH_APPTAINER, *_WITH_STAGE))}"
    _run(["mmdebstrap", "--quiet", "--variant=extract", late, include, "sid", str(folder)])
    for name in ("bin", "lib", "lib64", "sbin"):  # base-files' own, which is not among them
        if not (folder / name).exists():
            (folder / name).symlink_to(f"usr/{name}")
    for name in _FOLDERS:
        (folder / name).mkdir(parents=True, exist_ok=True)


def _run(command: Sequence[str]) -> None:
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, check=False, timeout=600
    )
    if done.returncode != 0:
        raise LabError(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
