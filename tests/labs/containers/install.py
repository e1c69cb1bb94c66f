# SPDX-License-Identifier: Apache-2.0
"""Have Debian's container programs installed, and Apptainer, which Debian has in sid alone."""

from __future__ import annotations

import fcntl
import shutil
from pathlib import Path
from typing import Final

from tests.labs.common import debian

_PACKAGES: Final = {
    "bubblewrap": "bwrap",
    "busybox-static": "busybox",
    "charliecloud-runtime": "ch-run",
    "mmdebstrap": "mmdebstrap",
    "podman": "podman",
    "runc": "runc",
    "util-linux": "unshare",
}
_APPLETS: Final = ("cat", "env", "id", "ls", "mknod", "sh", "true")
# Apptainer mounts images with the first, the stage starts programs with the second.
_WITH_APPTAINER: Final = ("fuse2fs", "fuse3", "squashfuse", "squashfs-tools")
_WITH_STAGE: Final = ("coreutils", "dash", "mount", "util-linux")
_FOLDERS: Final = ("home", "proc", "root", "run", "sys", "tmp", "var/tmp")
_SID: Final = Path(__file__).resolve().parents[3] / ".venv/.sid"


def install() -> None:
    """Install what is missing; packages stay."""
    debian.install(_PACKAGES)


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
    debian.run(["mmdebstrap", "--quiet", "--variant=extract", late, include, "sid", str(folder)])
    for name in ("bin", "lib", "lib64", "sbin"):  # base-files' own, which is not among them
        if not (folder / name).exists():
            (folder / name).symlink_to(f"usr/{name}")
    for name in _FOLDERS:
        (folder / name).mkdir(parents=True, exist_ok=True)
