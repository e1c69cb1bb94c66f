# SPDX-License-Identifier: Apache-2.0
"""The locks of a lab's node as its files tell them, while hooks make and take them."""

from __future__ import annotations

from pathlib import Path

from gpulock.store import owner
from gpulock.store.locks import Lock, LockStore
from gpulock.store.owner import Owner
from tests.support.wait import wait_until


def owners(folder: Path) -> dict[str, Owner]:
    """Return the owner of every lock in a `locks` folder; a claim at work is waited for."""
    places = sorted(folder.iterdir()) if folder.is_dir() else []
    return {place.name: record for place in places for record in settled(place)}


def settled(place: Path) -> list[Owner]:
    """Return the owner of one lock once it has one, nobody where the lock is gone."""
    (owner,) = wait_until(
        lambda: None if (now := look(place)) is None else (now,), why=f"an owner in {place}"
    )
    return owner


def look(place: Path) -> list[Owner] | None:
    """Return its owner, nobody where the lock is gone, None where it has no owner yet."""
    store = LockStore(str(place.parents[1]))
    try:
        text = (place / "owner").read_text()
    except FileNotFoundError:
        return None if place.is_dir() else []
    if owner.is_cut_short(text):
        return None  # it is being written
    record = owner.parse_owner(text)
    store.read_details([Lock(place.name, record, "")])
    return [record] if place.name in record.devices else []
