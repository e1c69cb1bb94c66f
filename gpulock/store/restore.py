# SPDX-License-Identifier: Apache-2.0
"""Put back what is missing of records and locks, each from the other; the gate is held.

Hot, loaded where a repair finds that they differ.
"""

import os

from gpulock.errors import UNKNOWN, Refusal
from gpulock.store import atomic, grants, kv, owner
from gpulock.store.locks import RECORD, Lock, LockStore, list_names, locks_of_records
from gpulock.store.owner import Owner


def compare_copies(
    store: LockStore,
    boot_id: str,
    records: dict[str, Owner],
    restored: dict[str, Owner],
) -> dict[str, Lock]:
    """Make every record and every lock's copy of it agree; return what is held, by id.

    `restored` gets what was put back. Raises OSError, Refusal.
    """
    copies = {name: read_owner_copy(store, name) for name in list_names(store.locks_dir)}
    texts = {token: store.read_record(token) for token in records}
    restore_records(store, boot_id, records, texts, copies, restored)
    held = locks_of_records(records)
    for name, lock in held.items():
        assert lock.owner is not None
        text = texts[lock.owner.token]
        if copies.get(name) != text:
            put_back_lock(store, name, text)
            if not copies.get(name):
                add_restored(restored, lock.owner, name)
    for name in copies.keys() - held.keys():
        lock = store.read(name)
        if lock.fault and parse_or_none(copies[name]) is None:
            held[name] = lock
        else:
            grants.remove_lock(store, name)
    return held


def add_restored(restored: dict[str, Owner], record: Owner, name: str) -> None:
    """Note that a device of a claim was put back."""
    before = restored.get(record.token)
    names = [*(before.devices if before else ()), name]
    restored[record.token] = record.copy(devices=tuple(dict.fromkeys(names)))


def put_back_lock(store: LockStore, name: str, text: str) -> None:
    """Make a lock again, or give it its owner again; raise OSError."""
    folder = f"{store.locks_dir}/{name}"
    atomic.mkdir_if_missing(folder)
    atomic.replace_file(f"{folder}/owner", as_bytes(text))


def as_bytes(text: str) -> bytes:
    """Return a text as it was read."""
    return text.encode("utf-8", "surrogateescape")


def parse_or_none(text: str) -> "Owner | None":
    """Return a record, None of what cannot be understood."""
    try:
        return owner.parse_owner(text)
    except kv.MalformedError:
        return None


def read_owner_copy(store: LockStore, name: str) -> str:
    """Return the text in a lock; nothing where there is none, or it cannot be read."""
    try:
        return atomic.read_text(f"{store.locks_dir}/{name}/owner")
    except OSError:
        return ""


def restore_records(
    store: LockStore,
    boot_id: str,
    records: dict[str, Owner],
    texts: dict[str, str],
    copies: dict[str, str],
    restored: dict[str, Owner],
) -> None:
    """Write back the records that locks have a copy of, and that are gone; raise OSError, Refusal.

    A folder without a record is one whose removal was cut short, where no lock has a copy; a
    hidden one is of a writer that was killed.
    """
    known = {*texts.values()}
    for name, text in copies.items():
        record = parse_or_none(text) if text not in known else None
        if record is None or record.boot_id != boot_id or record.token in records:
            continue
        folder = f"{store.claims_dir}/{record.token}"
        if os.path.isdir(folder):
            atomic.replace_file(f"{folder}/{RECORD}", as_bytes(text))
        else:
            grants.write_record_folder(store, record.token, as_bytes(text))
        records[record.token], texts[record.token] = record, text
        add_restored(restored, record, name)
    for token in os.listdir(store.claims_dir):
        if token in records:
            continue
        path = f"{store.claims_dir}/{token}"
        if token[0] != "." and os.path.lexists(f"{path}/{RECORD}"):
            why = f"claim {token} has no record of its own that can be read, and no lock a copy"
            raise Refusal(UNKNOWN, why, f"remove {path} if no job is left")
        atomic.remove_folder(path)
