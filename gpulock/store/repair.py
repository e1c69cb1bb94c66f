# SPDX-License-Identifier: Apache-2.0
"""Make records and locks agree: the first act of a claim or a reconcile that has the gate.

Hot. What an administrator removed of either is put back from the other. What a killed process left
half done is completed or cleared: a record gets its locks, and a lock that nobody names goes.
"""

import errno
import os
import stat

from gpulock.errors import UNKNOWN, Refusal, os_error_kind
from gpulock.store import atomic, grants, kv, owner
from gpulock.store.locks import RECORD, Lock, LockStore, list_names
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

    `thorough` reads also what seems to be a whole copy of its record, which takes a third more. The
    gate is held, and the boot is this one's. Raises Refusal.
    """
    done = Repair()
    try:
        for folder in (store.path, store.locks_dir, store.claims_dir, store.finished_dir):
            if not os.path.isdir(folder):
                atomic.mkdir_if_missing(folder)
        records = read_records(store, boot_id)
        copies = read_owner_copies(store, {} if thorough else records)
        restore_records(store, boot_id, records, copies, done)
        for text, record in records.values():
            for lock in store.list_claim_locks(record):
                if lock.id in done.held:
                    continue  # of another claim: root's doing, and both hold it
                if copies.get(lock.id) != text:
                    put_back_lock(store, lock.id, text)
                    if not copies.get(lock.id):
                        done.add_restored(record, lock.id)
                done.held[lock.id] = lock
        for name in copies.keys() - done.held.keys():
            lock = store.read(name)
            if lock.fault and parse_or_none(copies[name]) is None:
                done.held[name] = lock
            else:
                grants.remove_lock(store, name)
    except OSError as fault:
        kind = os_error_kind(fault)
        raise Refusal(
            kind, f"locks and records cannot be made to agree: {fault}", "look at LOCK_DIR"
        ) from fault
    done.held = dict(sorted(done.held.items()))
    return done


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


def read_owner_copies(store: LockStore, records: dict[str, tuple[str, Owner]]) -> dict[str, str]:
    """Return the text in each lock by id, nothing of one without owner; raise Refusal.

    A file as long as the one of `records` that names its lock is taken for its copy, and not read:
    what was cut short, or lags behind a record that changed, is of another length.
    """
    expected: dict[str, tuple[str, int]] = {}
    for text, record in records.values():
        size = len(as_bytes(text))
        for name in record.devices:
            expected.setdefault(name, (text, size))
    copies: dict[str, str] = {}
    for name in list_names(store.locks_dir):
        path, (text, size) = f"{store.locks_dir}/{name}/owner", expected.get(name, ("", 0))
        try:
            info = os.lstat(path) if size else None
            same = info is not None and info.st_size == size and stat.S_ISREG(info.st_mode)
            copies[name] = text if same else atomic.read_text(path)
        except OSError:  # what cannot be read and is named by no record becomes a fault
            copies[name] = ""
    return copies


def read_records(store: LockStore, boot_id: str) -> dict[str, tuple[str, Owner]]:
    """Return text and record of each claim of this boot by token; raise OSError, Refusal.

    Those of another boot are finished. Hidden folders are of writers that were killed.
    """
    records: dict[str, tuple[str, Owner]] = {}
    for token in os.listdir(store.claims_dir):
        if token[0] == ".":
            atomic.remove_folder(f"{store.claims_dir}/{token}")
            continue
        try:
            text = store.read_record(token)
        except FileNotFoundError:
            continue
        except OSError as fault:
            if fault.errno not in NO_CLAIM:
                raise
            path = f"{store.claims_dir}/{token}"
            raise Refusal(UNKNOWN, f"{path} is no claim's", f"rm -r {path}") from fault
        record = parse_or_none(text)
        if record and record.boot_id != boot_id:
            grants.finish_claim(store, token)
        elif record and record.token == token:
            records[token] = text, record
    return records


def restore_records(
    store: LockStore,
    boot_id: str,
    records: dict[str, tuple[str, Owner]],
    copies: dict[str, str],
    done: Repair,
) -> None:
    """Write back the records that locks have a copy of, and that are gone; raise OSError, Refusal.

    A folder without a record is one whose removal was cut short, where no lock has a copy.
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
        if os.path.lexists(f"{store.claims_dir}/{token}/{RECORD}"):
            why = f"claim {token} has no record of its own that can be read, and no lock a copy"
            raise Refusal(UNKNOWN, why, f"remove {store.claims_dir}/{token} if no job is left")
        atomic.remove_folder(f"{store.claims_dir}/{token}")
