# SPDX-License-Identifier: Apache-2.0
"""Devices that an administrator or a policy took out, kept in STATE_DIR over a reboot.

Hot: every claim lists the two folders, `quarantine/` (out of service) and `reserves/` (an
administrator's lock to be put back after a boot). One file a device: when, by whom, why.
"""

import os
import time

from gpulock.errors import BROKEN, Refusal
from gpulock.store import atomic, kv

QUARANTINE, RESERVES = "quarantine", "reserves"
POLICY = "gpulock"  # by whom, where no administrator did it; the cause stands before a colon


def list_noted_devices(state_dir: str, folder: str) -> list[str]:
    """Return the ids in one folder; raise Refusal(BROKEN) when it cannot be read (fail closed)."""
    try:
        return sorted([n for n in os.listdir(f"{state_dir}/{folder}") if not n.startswith(".")])
    except OSError as fault:
        raise Refusal(
            BROKEN, f"{state_dir}/{folder}: {fault.strerror}", "run gpulock reap as root"
        ) from fault


def read_device_note(state_dir: str, folder: str, device: str) -> dict[str, str]:
    """Return what is noted of one device; a note that cannot be read still counts."""
    try:
        return kv.decode_pairs(atomic.read_text(f"{state_dir}/{folder}/{device}"))
    except (OSError, kv.MalformedError) as fault:
        return {"reason": f"unreadable note: {fault}"}


def read_device_notes(state_dir: str, folder: str) -> dict[str, dict[str, str]]:
    """Return the notes in one folder by id, none where STATE_DIR was never used; raise Refusal."""
    if not os.path.lexists(f"{state_dir}/{folder}"):
        return {}
    names = list_noted_devices(state_dir, folder)
    return {name: read_device_note(state_dir, folder, name) for name in names}


def note_reason(note: dict[str, str]) -> str:
    """Return the reason in a note, and who wrote it."""
    reason = note.get("reason", "no reason noted")
    return f"{reason} ({note['by']})" if "by" in note else reason


def write_device_note(
    state_dir: str,
    folder: str,
    device: str,
    by: str,
    reason: str,
    more: "tuple[tuple[str, str], ...]" = (),
) -> None:
    """Note a device, durably, with `more` of what the policy must know later.

    Raises OSError or kv.MalformedError.
    """
    pairs = [("by", by), ("reason", reason), ("at", f"{time.time():.0f}"), *more]
    replace_file_durably(f"{state_dir}/{folder}/{device}", kv.encode_pairs(pairs).encode())


def remove_device_note(state_dir: str, folder: str, device: str) -> None:
    """Take a note back; raise FileNotFoundError when there is none."""
    os.unlink(f"{state_dir}/{folder}/{device}")
    fsync_path(f"{state_dir}/{folder}")


def replace_file_durably(path: str, data: bytes) -> None:
    """Put `data` in the place of `path` so that it outlives a power cut; raise OSError.

    A rename alone may outlive one as an empty file: ext4 allocates late.
    """
    atomic.replace_file(path, data)
    fsync_path(path)
    fsync_path(f"{path.rpartition('/')[0]}/.")  # STATE_DIR may be a link


def fsync_path(path: str) -> None:
    """Make a file, or what a folder lists, survive a power cut."""
    fd = os.open(path, atomic.OPEN_READ)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
