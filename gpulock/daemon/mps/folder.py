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

PID_FILE: Final = "nvidia-cuda-mps-control.pid"  # in PIPES
PID_BYTES: Final = 32
GONE: Final = ".gone."  # begins the name of a folder that is being removed


class MpsError(Exception):
    """Say why the MPS of a card cannot be started."""


def make_mps_dir(path: str) -> None:
    """Make MPS_DIR, or accept it where only root may write; raise MpsError or OSError."""
    check_above_mps_dir(path)
    atomic.mkdir_if_missing(path)
    if not is_private_folder(os.lstat(path)):
        raise MpsError(f"MPS_DIR={path}: others than root may write there")


def check_above_mps_dir(path: str) -> None:
    """Raise MpsError where MPS_DIR is below what others than root may write, or OSError.

    In a folder as /dev/shm any user could have it first, and logind's RemoveIPC empties it.
    """
    above = os.path.dirname(path)
    if not is_private_folder(os.stat(above)):
        raise MpsError(f"MPS_DIR={path}: others than root may write to {above}")


def is_private_folder(info: os.stat_result) -> bool:
    """Return whether a folder is ours or root's, and nobody else can write there."""
    writable = info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(info.st_mode) and info.st_uid in (0, os.geteuid()) and not writable


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


def write_server_note(
    folder: str, uid: int, boot_id: str, daemon: tuple[int, int, int] = (0, 0, 0)
) -> None:
    """Note whose the MPS is, and once it runs its daemon: pid, start and session; raise OSError."""
    numbers = zip(("uid", "pid", "start", "session"), (uid, *daemon))
    pairs = [(key, str(number)) for key, number in numbers]
    text = f"{LINE}\n{kv.encode_pairs([*pairs, ('boot_id', boot_id)])}"
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
        text = read_user_file(f"{folder}/{LOGS}", "control.log", 1 << 20)
    except OSError:
        return ""
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    return one_line(lines[-1][-200:]) if lines else ""


def read_daemon_pid(folder: str) -> list[int]:
    """Return the pid that MPS says its daemon has, none where it says nothing; never waits."""
    try:
        return [int(read_user_file(f"{folder}/{PIPES}", PID_FILE, PID_BYTES))]
    except (OSError, ValueError):
        return []


def read_user_file(folder: str, name: str, most: int) -> str:
    """Return what a file says in a folder that is the user's; raise OSError."""
    above = os.open(folder, atomic.OPEN_DIRECTORY)
    try:
        return atomic.read_text(name, most, above)
    finally:
        os.close(above)
