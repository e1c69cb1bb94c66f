# SPDX-License-Identifier: Apache-2.0
"""Make records and locks agree: the first act of a claim or a reconcile that has the gate.

Hot. What an administrator removed of either is put back from the other. What a killed process left
half done is completed or cleared: a record gets its locks, and a lock that nobody names goes.
"""

import errno
import os

from gpulock.errors import UNKNOWN, Refusal, os_error_kind
from gpulock.store import atomic, grants
from gpulock.store.locks import Lock, LockStore, list_names, locks_of_records
from gpulock.store.owner import Owner

# what reading a claim's record fails with where root put something else there
NO_CLAIM = (errno.ENOTDIR, errno.ELOOP, errno.EISDIR)


def repair_locks(
    store: LockStore, boot_id: str, restored: "dict[str, Owner] | None" = None
) -> dict[str, Lock]:
    """Put back what is missing, clear what is half done, and return what is held, by id.

    Where records name just the locks that are there, copies are compared only if `restored` is
    given. It gets the records, by token, with the devices that were put back.
    The gate is held, and the boot is this one's. Raises Refusal.
    """
    try:
        for folder in (store.path, store.locks_dir, store.claims_dir, store.finished_dir):
            if not os.path.isdir(folder):
                atomic.mkdir_if_missing(folder)
        records, whole = read_own_records(store, boot_id)
        held = locks_of_records(records)
        if restored is not None or not whole or held.keys() != {*list_names(store.locks_dir)}:
            from gpulock.store.restore import compare_copies

            held = compare_copies(store, boot_id, records, {} if restored is None else restored)
    except OSError as fault:
        kind = os_error_kind(fault)
        raise Refusal(
            kind, f"locks and records cannot be made to agree: {fault}", "run gpulock doctor"
        ) from fault
    return dict(sorted(held.items()))


def read_own_records(store: LockStore, boot_id: str) -> tuple[dict[str, Owner], bool]:
    """Return the record of each claim of this boot by token, and whether all have one.

    Those of another boot are finished. Raises OSError or Refusal.
    """
    records, faults = store.read_records()
    for token, fault in faults.items():
        if isinstance(fault, OSError):
            if fault.errno not in NO_CLAIM:
                raise fault
            path = f"{store.claims_dir}/{token}"
            raise Refusal(UNKNOWN, f"{path} is no claim's", f"rm -r {path}") from fault
    for token, record in [*records.items()]:
        if (record.token, record.boot_id) != (token, boot_id):
            del records[token]
        if record.boot_id != boot_id:
            grants.finish_claim(store, token)
    return records, len(records) == len(os.listdir(store.claims_dir))
