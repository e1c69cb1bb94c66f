# SPDX-License-Identifier: Apache-2.0
"""Whether another user can reach a place: programs of the checkout are run as one."""

from __future__ import annotations

from pathlib import Path

NOBODY = 65534


def unreachable_folder(path: Path, uid: int) -> Path | None:
    """Return the first folder above `path` that a user without groups may not enter."""
    for folder in reversed(path.resolve().parents):
        status = folder.stat()
        if not status.st_mode & (0o100 if status.st_uid == uid else 0o001):
            return folder
    return None
