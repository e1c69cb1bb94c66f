# SPDX-License-Identifier: Apache-2.0
"""Claims that a test puts in place by hand, changes and ends, device by device."""

from __future__ import annotations

import os
from pathlib import Path

from gpulock.store import atomic, grants
from gpulock.store.locks import MPS, RECORD, Lock, LockStore
from gpulock.store.owner import Owner, encode_owner, parse_owner


def place_lock(store: LockStore, name: str, record: Owner) -> None:
    """Lock one device for an owner; a claim of the same token has it besides what it has.

    A record with several devices names all of them, whether they are locked or not.
    """
    for folder in (store.locks_dir, store.claims_dir, store.finished_dir):
        os.makedirs(folder, exist_ok=True)
    devices = record.devices if name in record.devices else (name,)
    whole = record.copy(devices=devices)
    if os.path.lexists(f"{store.claims_dir}/{record.token}"):
        before = parse_owner(store.read_record(record.token))
        kept = [one for one in before.devices if one != name]
        left = before.of_devices(kept)
        fresh = [one for one in devices if one not in kept]
        more = whole.of_devices(fresh)
        whole = whole.copy(
            devices=(*left.devices, *more.devices),
            uuids=(*left.uuids, *more.uuids),
            minors=(*left.minors, *more.minors),
        )
    os.mkdir(f"{store.locks_dir}/{name}")
    write_record(store, whole)
    if record.draining:
        store.mark_draining(record.token)


def write_record(store: LockStore, record: Owner) -> None:
    """Write the record of a claim, and its copies in the locks that are there."""
    data = encode_owner(record).encode()
    os.makedirs(f"{store.claims_dir}/{record.token}", exist_ok=True)
    atomic.replace_file(f"{store.claims_dir}/{record.token}/record", data)
    for name in record.devices:
        if os.path.isdir(f"{store.locks_dir}/{name}"):
            atomic.replace_file(f"{store.locks_dir}/{name}/owner", data)


def change_record(store: LockStore, name: str, record: Owner) -> None:
    """Let a lock be another owner's, or be as this record says; one of another token goes."""
    now = store.read(name).owner
    if now is not None and now.token != record.token:
        end_lock(store, name)
        place_lock(store, name, record)
        return
    if now is not None:
        kept = parse_owner(store.read_record(record.token))
        record = record.copy(uuids=kept.uuids, minors=kept.minors, devices=kept.devices)
    write_record(store, record)
    if record.draining:
        store.mark_draining(record.token)


def end_lock(store: LockStore, name: str) -> None:
    """Take a lock away, and the record of its claim."""
    now = store.read(name).owner
    grants.undo_claim(store, now.token if now else "none", [name])


def retire_lock(store: LockStore, lock: Lock, how: str) -> None:
    """Release one device of a claim."""
    assert lock.owner
    grants.release_devices(store, lock.owner.token, [lock.id], how, lock.owner.boot_id)


def say_mps(store: LockStore, mark: str) -> None:
    """Say of every claim what gpulockd does of the MPS of its card."""
    for token in os.listdir(store.claims_dir):
        Path(store.claims_dir, token, MPS).write_text(mark)


def spoil_record(store: LockStore, token: str) -> None:
    """Leave a record that cannot be read, and of which no lock has a copy."""
    folder = Path(store.claims_dir, token)
    folder.mkdir(parents=True)
    (folder / RECORD).write_text("v2\n")
