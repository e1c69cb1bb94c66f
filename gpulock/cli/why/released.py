# SPDX-License-Identifier: Apache-2.0
"""What `released/` still knows of claims that are over; its order is that of their end."""

from __future__ import annotations

import os
from typing import NamedTuple

from gpulock.cli.select import Subject
from gpulock.store import atomic, kv, owner
from gpulock.store.owner import Owner


class ReleasedLock(NamedTuple):
    """A lock that was released: the device, its owner, when and how (0 and "" where not noted)."""

    device: str
    owner: Owner
    at: float
    how: str


def list_released_locks(released_dir: str) -> list[ReleasedLock]:
    """Return every released lock that can be read, the latest first."""
    try:
        names = os.listdir(released_dir)
    except FileNotFoundError:
        return []
    found = [one for name in names if (one := read_released_entry(released_dir, name)) is not None]
    return sorted(found, key=lambda one: (-one.at, one.device))


def read_released_entry(released_dir: str, name: str) -> ReleasedLock | None:
    """Return one released lock, None for what is pruned meanwhile or unreadable."""
    try:
        record = owner.parse_owner(atomic.read_text(f"{released_dir}/{name}/owner"))
    except (OSError, kv.MalformedError):
        return None
    try:
        note = kv.decode_pairs(atomic.read_text(f"{released_dir}/{name}/released"))
        at = float(note.get("released_at", "0"))
    except (OSError, ValueError):
        note, at = {}, 0.0
    return ReleasedLock(name.partition(".")[2], record, at, note.get("how", ""))


def filter_released_locks(found: list[ReleasedLock], what: Subject) -> list[ReleasedLock]:
    """Return what a job, process or device held, the latest first."""
    if what.device is not None:
        return [one for one in found if one.device == what.device.id]
    return [one for one in found if what.owns(one.owner)]
