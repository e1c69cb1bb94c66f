# SPDX-License-Identifier: Apache-2.0
"""Devices that an administrator or a policy took out, kept in STATE_DIR over a reboot.

Hot: every claim lists the folder `quarantine`. A note has a device's id as its name, and says when,
by whom, why. One of an administrator's lock, to be put back after a boot, ends with `.reserve`.

STATE_DIR/cards names the suspects, which claims take last. gpulockd writes it by the exporter's
word. So it is a preference: it refuses no job a device, and what cannot be read counts as nothing.
"""

import os
import time

from gpulock.errors import UNKNOWN, Refusal, os_error_kind
from gpulock.store import atomic, kv

FOLDER = "quarantine"  # in STATE_DIR
QUARANTINE, RESERVE = "", ".reserve"  # the kinds of a note, by how its name ends
CARDS = "cards"  # in STATE_DIR: see cards.py
CARDS_LINE = "gpulock-cards 1"
CARDS_LIMIT = 1 << 20  # bytes: 128 instances with twenty findings each are 0.2 MB
SUSPECT = "suspect "  # begins the line of a device that claims take last, before its id
LOST_MARK = "quarantine.lost"  # in STATE_DIR: its folders were lost within a boot, and made again
LOST = " was lost: GPUs that were out of service may be granted from now on"
QUARANTINE_AGAIN = "quarantine them again, see gpulock doctor"
POLICY = "gpulock"  # by whom, where no administrator did it; the cause stands before a colon


def list_noted_devices(state_dir: str, kind: str) -> list[str]:
    """Return the ids with a note of one kind; raise Refusal when that cannot be read."""
    names = list_note_names(state_dir)
    reserved = kind == RESERVE
    return [name.removesuffix(kind) for name in names if name.endswith(RESERVE) is reserved]


def list_note_names(state_dir: str) -> list[str]:
    """Return the names of all notes; raise Refusal when they cannot be read (fail closed)."""
    folder = f"{state_dir}/{FOLDER}"
    try:
        return sorted([name for name in os.listdir(folder) if not name.startswith(".")])
    except FileNotFoundError as fault:
        raise Refusal(UNKNOWN, f"{folder}{LOST}", QUARANTINE_AGAIN) from fault
    except OSError as fault:
        why = f"{folder}: {fault.strerror}"
        raise Refusal(os_error_kind(fault), why, "look at STATE_DIR") from fault


def read_device_note(state_dir: str, kind: str, device: str) -> dict[str, str]:
    """Return what is noted of one device; a note that cannot be read still counts."""
    try:
        return kv.decode_pairs(atomic.read_text(f"{state_dir}/{FOLDER}/{device}{kind}"))
    except (OSError, kv.MalformedError) as fault:
        return {"reason": f"unreadable note: {fault}"}


def read_device_notes(state_dir: str, kind: str) -> dict[str, dict[str, str]]:
    """Return the notes of one kind by id, none where STATE_DIR was never used; raise Refusal."""
    if not os.path.lexists(f"{state_dir}/{FOLDER}"):
        return {}
    names = list_noted_devices(state_dir, kind)
    return {name: read_device_note(state_dir, kind, name) for name in names}


def note_reason(note: dict[str, str]) -> str:
    """Return the reason in a note, and who wrote it."""
    reason = note.get("reason", "no reason noted")
    return f"{reason} ({note['by']})" if "by" in note else reason


def write_device_note(
    state_dir: str,
    kind: str,
    device: str,
    by: str,
    reason: str,
    more: "tuple[tuple[str, str], ...]" = (),
) -> None:
    """Note a device, durably, with `more` of what the policy must know later.

    Raises OSError or kv.MalformedError. The claim that made the folder did not wait for the disk.
    """
    pairs = [("by", by), ("reason", reason), ("at", f"{time.time():.0f}"), *more]
    data = kv.encode_pairs(pairs).encode()
    atomic.replace_file(f"{state_dir}/{FOLDER}/{device}{kind}", data, durable=True)
    atomic.fsync_path(f"{state_dir}/.")


def remove_device_note(state_dir: str, kind: str, device: str) -> None:
    """Take a note back; raise FileNotFoundError when there is none."""
    os.unlink(f"{state_dir}/{FOLDER}/{device}{kind}")
    atomic.fsync_path(f"{state_dir}/{FOLDER}/.")


def read_suspect_cards(state_dir: str, boot_id: str) -> dict[str, str]:
    """Return why each device is suspect, by lock id; nothing where that is not known."""
    try:
        text = atomic.read_text(f"{state_dir}/{CARDS}", CARDS_LIMIT)
    except OSError:
        return {}
    if f"\n{SUSPECT}" not in text or not text.startswith(f"{CARDS_LINE}\nboot_id={boot_id}\n"):
        return {}
    lines = [line for line in text.split("\n") if line.startswith(SUSPECT)]
    pairs = [line[len(SUSPECT) :].partition("=") for line in lines]
    return {name: why for name, equals, why in pairs if equals}
