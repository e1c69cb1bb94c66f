# SPDX-License-Identifier: Apache-2.0
"""MPS_DIR: a folder for each card that has an MPS, with pipes and logs that are its user's.

MPS_DIR and the folder of a card are root's, so that the user cannot put a link in the place of
`pipe` or `log`. What the user has made in there is removed by rm(1), which follows no link.
"""

from __future__ import annotations

import os
import stat
import subprocess
from typing import Final

from gpulock.daemon.core.background_call import BackgroundCall
from gpulock.errors import one_line
from gpulock.job.mps import LINE, LOGS, PIPES, SERVER
from gpulock.store import atomic, kv

GONE: Final = ".gone."  # begins the name of a folder that is being removed
ATTEMPTS: Final = 3  # to take the name of MPS_DIR from a user who has it


class MpsError(Exception):
    """Say why the MPS of a card cannot be started."""


def make_mps_dir(path: str) -> None:
    """Make MPS_DIR, or accept it where it is root's; raise MpsError or OSError.

    Below a sticky folder as /dev/shm any user may have made it first: that one is moved away.
    """
    for _ in range(ATTEMPTS):
        atomic.mkdir_if_missing(path)
        info = os.lstat(path)
        if is_private_folder(info):
            return
        above = os.stat(os.path.dirname(path))
        if not above.st_mode & stat.S_ISVTX or info.st_uid in (0, os.geteuid()):
            raise MpsError(f"{path} can be written by others than root")
        os.rename(path, f"{path}.not-ours.{os.urandom(6).hex()}")
    raise MpsError(f"a user makes {path} again and again")


def is_private_folder(info: os.stat_result) -> bool:
    """Return whether a folder is ours, and nobody else can write there."""
    writable = info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid() and not writable


def make_card_folder(folder: str, uid: int, gid: int, boot_id: str) -> None:
    """Make the folder of one card's MPS, with the user's own inside; raise MpsError or OSError.

    The note of whose it is comes first: from then on the card is closed to others.
    """
    make_mps_dir(os.path.dirname(folder))
    os.mkdir(folder, 0o755)
    write_server_note(folder, uid, boot_id)
    for name in (PIPES, LOGS):
        os.mkdir(f"{folder}/{name}", 0o700)
        if os.geteuid() != uid:
            os.chown(f"{folder}/{name}", uid, gid)


def write_server_note(folder: str, uid: int, boot_id: str, pid: int = 0, start: int = 0) -> None:
    """Note whose the MPS is, and once it runs its daemon; raise OSError."""
    pairs = [("uid", uid), ("pid", pid), ("start", start), ("boot_id", boot_id)]
    text = f"{LINE}\n{kv.encode_pairs([(key, str(value)) for key, value in pairs])}"
    atomic.replace_file(f"{folder}/{SERVER}", text.encode())


def read_server_note(folder: str) -> dict[str, str]:
    """Return what the note says, nothing where it cannot be read."""
    try:
        return kv.decode_pairs(atomic.read_text(f"{folder}/{SERVER}"), LINE)
    except (OSError, ValueError):
        return {}


def list_card_folders(mps_dir: str) -> list[str]:
    """Return the folders of cards, and remove what was being removed."""
    try:
        if not is_private_folder(os.lstat(mps_dir)):
            return []
        names = sorted(os.listdir(mps_dir))
    except OSError:
        return []
    start_removal([f"{mps_dir}/{name}" for name in names if name.startswith(GONE)])
    return [f"{mps_dir}/{name}" for name in names if not name.startswith(".")]


def remove_card_folder(folder: str) -> None:
    """Let a card's folder be gone at once, and removed in the background; raise OSError."""
    above = os.path.dirname(folder)
    gone = f"{above}/{GONE}{os.urandom(8).hex()}"
    try:
        os.rename(folder, gone)
    except FileNotFoundError:
        return
    start_removal([gone])


def start_removal(folders: list[str]) -> None:
    """Remove folders, however much a user has put there; nobody waits for it."""
    if folders:
        words = ["rm", "-rf", "--one-file-system", "--", *folders]
        BackgroundCall(lambda: subprocess.run(words, stderr=subprocess.DEVNULL, check=False))


def read_control_log(folder: str) -> str:
    """Return the last line of MPS's own log, nothing where there is none; never waits."""
    try:
        above = os.open(f"{folder}/{LOGS}", atomic.OPEN_DIRECTORY)
        try:
            text = atomic.read_text("control.log", 1 << 20, above)
        finally:
            os.close(above)
    except OSError:
        return ""
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    return one_line(lines[-1][-200:]) if lines else ""
