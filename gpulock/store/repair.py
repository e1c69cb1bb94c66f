# SPDX-License-Identifier: Apache-2.0
"""Make records and locks agree: the first act of a claim or a reconcile that has the gate.

Hot. What an administrator removed of either is put back from the other. What a killed process left
half done is completed or cleared: a record gets its locks, and a lock that nobody names goes.
"""

import errno
import os

from gpulock.errors import UNKNOWN, Refusal, os_error_kind
from gpulock.store import atomic, grants, kv, owner
from gpulock.store.locks import RECORD, Lock, LockStore, list_names, locks_of_records
from gpulock.store.owner import Owner

# what reading a claim's record fails with where root put something else there
NO_CLAIM = (errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.EINVAL)


class Repair:
    """What is held once it is whole: `held` by id; `restored` has records of what was put back.

    These are by token, and name only the devices that were.
    """

    def __init__(self) -> None:
        self.held: dict[str, Lock] = {}
        self.restored: dict[str, Owner] = {}

    def add_restored(self, record: Owner, name: str) -> None:
        """Note that a device of a claim was put back."""
        before = self.restored.get(record.token)
        names = [*(before.devices if before else ()), name]
        self.restored[record.token] = record.copy(devices=tuple(dict.fromkeys(names)))


def repair_locks(store: LockStore, boot_id: str, thorough: bool = False) -> Repair:
    """Put back what is missing, clear what is half done, and return what is held.

    Where records name just the locks that are there, only a `thorough` repair reads their copies.
    The gate is held, and the boot is this one's. Raises Refusal.
    """
    done = Repair()
    try:
        for folder in (store.path, store.locks_dir, store.claims_dir, store.finished_dir):
            if not os.path.isdir(folder):
                atomic.mkdir_if_missing(folder)
        records, whole = read_own_records(store, boot_id)
        done.held = locks_of_records([record for _, record in records.values()])
        if thorough or not whole or done.held.keys() != {*list_names(store.locks_dir)}:
            compare_copies(store, boot_id, records, done)
    except OSError as fault:
        kind = os_error_kind(fault)
        raise Refusal(
            kind, f"locks and records cannot be made to agree: {fault}", "look at LOCK_DIR"
        ) from fault
    done.held = dict(sorted(done.held.items()))
    return done


def compare_copies(
    store: LockStore, boot_id: str, records: dict[str, tuple[str, Owner]], done: Repair
) -> None:
    """Make every record and every lock's copy of it agree; raise OSError, Refusal."""
    copies = {name: read_owner_copy(store, name) for name in list_names(store.locks_dir)}
    restore_records(store, boot_id, records, copies, done)
    done.held = locks_of_records([record for _, record in records.values()])
    for name, lock in done.held.items():
        assert lock.owner is not None
        text = records[lock.owner.token][0]
        if copies.get(name) != text:
            put_back_lock(store, name, text)
            if not copies.get(name):
                done.add_restored(lock.owner, name)
    for name in copies.keys() - done.held.keys():
        lock = store.read(name)
        if lock.fault and parse_or_none(copies[name]) is None:
            done.held[name] = lock
        else:
            grants.remove_lock(store, name)


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


def read_own_records(store: LockStore, boot_id: str) -> tuple[dict[str, tuple[str, Owner]], bool]:
    """Return text and record of each claim of this boot by token, and whether all have one.

    Those of another boot are finished. Raises OSError or Refusal.
    """
    found, faults = store.read_records()
    for token, fault in faults.items():
        if isinstance(fault, OSError):
            if fault.errno not in NO_CLAIM:
                raise fault
            path = f"{store.claims_dir}/{token}"
            raise Refusal(UNKNOWN, f"{path} is no claim's", f"rm -r {path}") from fault
    records: dict[str, tuple[str, Owner]] = {}
    for token, (text, record) in found.items():
        if record.boot_id != boot_id:
            grants.finish_claim(store, token)
        elif record.token == token:
            records[token] = text, record
    return records, len(records) == len(os.listdir(store.claims_dir))


def restore_records(
    store: LockStore,
    boot_id: str,
    records: dict[str, tuple[str, Owner]],
    copies: dict[str, str],
    done: Repair,
) -> None:
    """Write back the records that locks have a copy of, and that are gone; raise OSError, Refusal.

    A folder without a record is one whose removal was cut short, where no lock has a copy; a
    hidden one is of a writer that was killed.
    """
    known = {text for text, _ in records.values()}
    for name, text in copies.items():
        record = parse_or_none(text) if text not in known else None
        if record is None or record.boot_id != boot_id or record.token in records:
            continue
        folder = f"{store.claims_dir}/{record.token}"
        if os.path.isdir(folder):
            atomic.replace_file(f"{folder}/{RECORD}", as_bytes(text))
        else:
            grants.write_record_folder(store, record.token, as_bytes(text))
        records[record.token] = text, record
        done.add_restored(record, name)
    for token in os.listdir(store.claims_dir):
        if token in records:
            continue
        path = f"{store.claims_dir}/{token}"
        if token[0] != "." and os.path.lexists(f"{path}/{RECORD}"):
            why = f"claim {token} has no record of its own that can be read, and no lock a copy"
            raise Refusal(UNKNOWN, why, f"remove {path} if no job is left")
        atomic.remove_folder(path)
