# SPDX-License-Identifier: Apache-2.0
"""STATE_DIR-mps: a folder for each card that has an MPS, with pipes and logs that are its user's.

It and the folder of a card are root's, so that the user cannot put a link in the place of `pipe` or
`log`. What the user has made in there is removed by rm(1), which follows no link.
"""

from __future__ import annotations

import os
import subprocess
from typing import Final

from gpulock.daemon.core.background_call import BackgroundCall
from gpulock.errors import one_line
from gpulock.job.mps import LINE, LOGS, PIPES, SERVER
from gpulock.store import atomic, kv

GONE: Final = ".gone."  # begins the name of a folder that is being removed


class MpsError(Exception):
    """Say why the MPS of a card cannot be started."""


def make_card_folder(folder: str, uid: int, boot_id: str) -> None:
    """Make the folder of one card's MPS, with the user's own inside; raise OSError.

    The note of whose it is comes first: from then on the card is closed to others.
    """
    atomic.mkdir_if_missing(os.path.dirname(folder))
    os.mkdir(folder, 0o755)
    write_server_note(folder, uid, boot_id)
    for name in (PIPES, LOGS):
        os.mkdir(f"{folder}/{name}", 0o700)
        if os.geteuid() != uid:
            os.chown(f"{folder}/{name}", uid, -1)


def write_server_note(folder: str, uid: int, boot_id: str) -> None:
    """Note whose the MPS of a card is; raise OSError."""
    pairs = [("uid", str(uid)), ("boot_id", boot_id)]
    atomic.replace_file(f"{folder}/{SERVER}", f"{LINE}\n{kv.encode_pairs(pairs)}".encode())


def list_card_folders(mps_dir: str) -> list[str]:
    """Return the folders of cards, and remove what was being removed."""
    try:
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
