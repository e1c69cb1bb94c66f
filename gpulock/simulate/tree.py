# SPDX-License-Identifier: Apache-2.0
"""A tree of files as a value, and the one function that writes it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Union

FOLDER_MODE = 0o755
FILE_MODE = 0o644
DEVICES = "dev/"  # begins the paths of device files, which are empty regular files
DEVICE_MODE = 0o666  # as the driver's DeviceFileMode 438


# a file's bytes, a link's target, or a folder that may be empty
Entry = Union[bytes, str, None]
Tree = dict[str, Entry]


def write_tree(root: Path, tree: Mapping[str, Entry]) -> None:
    """Write `tree` below `root`, which must not hold any of its files yet.

    Modes are set whatever the umask is: hooks refuse a lock folder that a group may write.
    """
    made = {root}
    for path, entry in sorted(tree.items()):
        target = root / path
        _make_tree_folders(target if entry is None else target.parent, made)
        if isinstance(entry, str):
            os.symlink(entry, target)
        elif entry is not None:
            write_tree_file(target, entry, DEVICE_MODE if path.startswith(DEVICES) else FILE_MODE)


def _make_tree_folders(folder: Path, made: set[Path]) -> None:
    if folder in made:
        return
    _make_tree_folders(folder.parent, made)
    made.add(folder)
    try:
        folder.mkdir()
    except FileExistsError:
        return
    folder.chmod(FOLDER_MODE)


def write_tree_file(target: Path, data: bytes, mode: int = FILE_MODE) -> None:
    """Create one file of exactly this mode; raise FileExistsError when there is something."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(target, flags, mode)
    with open(descriptor, "wb") as file:
        file.write(data)
        os.fchmod(descriptor, mode)
