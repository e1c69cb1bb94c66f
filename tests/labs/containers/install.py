# SPDX-License-Identifier: Apache-2.0
"""The image of a small container, and the root with Apptainer, which Debian has in sid alone."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

_APPLETS: Final = ("cat", "env", "id", "ls", "mknod", "sh", "true")
SID: Final = Path("/srv/sid")  # tests/root/packages.py


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
