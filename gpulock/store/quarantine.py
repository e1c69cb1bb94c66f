# SPDX-License-Identifier: Apache-2.0
"""Devices that an administrator or a policy took out, kept in STATE_DIR over a reboot.

Hot: every claim lists the two folders, `quarantine/` (out of service) and `reserves/` (an
administrator's lock to be put back after a boot). One file a device: when, by whom, why.

STATE_DIR/cards names the suspects, which claims take last. gpulockd writes it by the exporter's
word. So it is a preference: it refuses no job a device, and what cannot be read counts as nothing.
"""

import os
import time

from gpulock.errors import UNKNOWN, Refusal, os_error_kind
from gpulock.store import atomic, kv

QUARANTINE, RESERVES = "quarantine", "reserves"
CARDS = "cards"  # in STATE_DIR: see cards.py
CARDS_LINE = "gpulock-cards 1"
CARDS_LIMIT = 1 << 20  # bytes: 128 instances with twenty findings each are 0.2 MB
SUSPECT = "suspect "  # begins the line of a device that claims take last, before its id
LOST_MARK = "quarantine.lost"  # in STATE_DIR: its folders were lost within a boot, and made again
LOST = " was lost: GPUs that were out of service may be granted from now on"
QUARANTINE_AGAIN = "quarantine them again, see gpulock doctor"
POLICY = "gpulock"  # by whom, where no administrator did it; the cause stands before a colon


def list_noted_devices(state_dir: str, folder: str) -> list[str]:
    """Return the ids in one folder; raise Refusal when it cannot be read (fail closed)."""
    try:
        return sorted([n for n in os.listdir(f"{state_dir}/{folder}") if not n.startswith(".")])
    except FileNotFoundError as fault:
        raise Refusal(UNKNOWN, f"{state_dir}/{folder}{LOST}", QUARANTINE_AGAIN) from fault
    except OSError as fault:
        why = f"{state_dir}/{folder}: {fault.strerror}"
        raise Refusal(os_error_kind(fault), why, "look at STATE_DIR") from fault


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

    Raises OSError or kv.MalformedError. The claim that made the folder did not wait for the disk.
    """
    pairs = [("by", by), ("reason", reason), ("at", f"{time.time():.0f}"), *more]
    data = kv.encode_pairs(pairs).encode()
    atomic.replace_file(f"{state_dir}/{folder}/{device}", data, durable=True)
    atomic.fsync_path(f"{state_dir}/.")


def remove_device_note(state_dir: str, folder: str, device: str) -> None:
    """Take a note back; raise FileNotFoundError when there is none."""
    os.unlink(f"{state_dir}/{folder}/{device}")
    atomic.fsync_path(f"{state_dir}/{folder}/.")


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
