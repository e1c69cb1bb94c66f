# SPDX-License-Identifier: Apache-2.0
"""Make, shrink and finish claims; the gate is held.

Hot. A record comes before its locks and goes after them: killed at any instruction, a claim has a
record, and the next holder of the gate makes its locks whole.
"""

import errno
import os
import time

from gpulock.errors import UNKNOWN, Refusal, one_line
from gpulock.store import atomic, kv, owner
from gpulock.store.event_kinds import DROPPED
from gpulock.store.events import note_event
from gpulock.store.locks import RECORD, RELEASED, LockStore
from gpulock.store.owner import Owner

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection

FINISHED_CAP = 1000  # claims that wait for their history line
FINISHED_PRUNE = 500  # how many of the oldest go when the cap is reached
OWED = "owed"  # folder of STATE_DIR: a copy of each record, until its line is in the history
OWED_CAP = 1000  # copies that are kept over a boot


def make_claim(store: LockStore, record: Owner) -> None:
    """Write a record and make its locks, or neither; raise OSError (EEXIST: a lock is there)."""
    data = owner.encode_owner(record).encode("utf-8")
    made: list[str] = []
    try:
        write_record_folder(store, record.token, data)
        for name in record.devices:
            os.mkdir(f"{store.locks_dir}/{name}", 0o755)
            made.append(name)
            atomic.create_file(f"{store.locks_dir}/{name}/owner", data)
    except BaseException:
        undo_claim(store, record.token, made)
        raise


def write_record_folder(store: LockStore, token: str, data: bytes) -> None:
    """Give a claim its record; raise OSError. The folder has its name once the record is whole."""
    beside = f"{store.claims_dir}/{atomic.name_temporary(token)}"
    os.mkdir(beside, 0o755)
    atomic.create_file(f"{beside}/{RECORD}", data)
    os.rename(beside, f"{store.claims_dir}/{token}")


def undo_claim(store: LockStore, token: str, names: "Collection[str]") -> None:
    """Take back a claim that this process just made; what fails is reaped later."""
    try:
        for name in reversed(list(names)):
            remove_lock(store, name)
        atomic.remove_folder(f"{store.claims_dir}/{token}")
    except OSError:
        return


def remove_lock(store: LockStore, name: str) -> None:
    """Remove one lock directory, or what stands in its place, or nothing where it is gone.

    What a link leads to stays, another lock perhaps. Raises OSError.
    """
    folder = f"{store.locks_dir}/{name}"
    try:
        if not os.path.islink(folder):
            atomic.remove_quietly(f"{folder}/owner")
        os.rmdir(folder)
    except FileNotFoundError:
        return
    except OSError:  # what a killed writer left is in it as well
        atomic.remove_folder(folder)


def rewrite_claim(store: LockStore, record: Owner) -> None:
    """Replace the record of a claim, then the copies in its locks; raise OSError."""
    data = owner.encode_owner(record).encode("utf-8")
    atomic.replace_file(f"{store.claims_dir}/{record.token}/{RECORD}", data)
    for name in record.devices:
        try:
            atomic.replace_file(f"{store.locks_dir}/{name}/owner", data)
        except FileNotFoundError:
            continue  # somebody removed the lock: the next repair makes it


def release_devices(
    store: LockStore, token: str, names: "Collection[str]", how: str, boot_id: str
) -> None:
    """Free devices of a claim; raise Refusal where it has them no more, or OSError.

    Of some of them only, the record shrinks first: else a repair brings the others back. `boot_id`
    is this boot's: the end of a claim of another one is not known by CLOCK_BOOTTIME.
    """
    folder = f"{store.claims_dir}/{token}"
    try:
        record = owner.parse_owner(store.read_record(token))
    except FileNotFoundError:
        record = None
    except kv.MalformedError as fault:
        raise OSError(0, f"the record of claim {token}: {fault}") from fault
    if record is None or not set(names) <= set(record.devices):
        what = " ".join(sorted(names))
        raise Refusal(UNKNOWN, f"the lock of {what} changed meanwhile", "try again")
    note_released(f"{folder}/{RELEASED}", record.of_devices(list(names)), how, boot_id)
    left = [name for name in record.devices if name not in names]
    if left:
        rewrite_claim(store, record.of_devices(left))
    for name in names:
        remove_lock(store, name)
    if not left:
        finish_claim(store, token)


def note_released(path: str, record: Owner, how: str, boot_id: str) -> None:
    """Add a line for each device of a record, which the history needs: what was it, when, and how.

    It is id, epoch, CLOCK_BOOTTIME, minor, UUID and how; `-` is not known. An empty line before it
    ends one that was cut short.
    """
    at, boottime = f"{time.time():.3f}", "-"
    if record.boot_id == boot_id:
        boottime = f"{time.clock_gettime(time.CLOCK_BOOTTIME):.3f}"
    lines = ["\n"]
    for name in record.devices:
        minor, uuid = record.minor_of(name) or "-", record.uuid_of(name) or "-"
        words = name, at, boottime, minor, uuid, one_line(how)
        lines.append(" ".join(words) + "\n")
    try:
        atomic.append_file(path, "".join(lines).encode("utf-8", "replace"))
    except OSError:
        return  # the history lacks when and how


def finish_claim(store: LockStore, token: str) -> None:
    """Move the record of a claim to those that wait for their history line; raise OSError."""
    try:
        os.rename(f"{store.claims_dir}/{token}", f"{store.finished_dir}/{token}")
    except OSError as fault:
        if fault.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        atomic.remove_folder(f"{store.claims_dir}/{token}")  # it was finished, and put back
    drop_oldest(store, store.finished_dir, FINISHED_CAP, FINISHED_CAP - FINISHED_PRUNE)


def drop_oldest(store: LockStore, folder: str, cap: int, keep: int) -> None:
    """Drop all but the last `keep` in a folder that has `cap`, as far as possible; count them."""
    try:
        paths = [f"{folder}/{name}" for name in os.listdir(folder) if name[0] != "."]
        if len(paths) < cap:
            return
        paths.sort(key=lambda path: os.lstat(path).st_mtime)
        note_event(store.path, DROPPED, str(len(paths[:-keep])))
        for path in paths[:-keep]:
            atomic.remove_folder(path)
    except OSError:
        return


def note_owed_line(state_dir: str, store: LockStore, record: Owner) -> None:
    """Note that a claim will be owed a line of the history; what fails here fails no job.

    Where finished claims pile up nobody writes a history: these records would pile up as well.
    """
    folder = f"{state_dir}/{OWED}"
    try:
        if len(os.listdir(store.finished_dir)) >= FINISHED_PRUNE:
            return
    except OSError:
        pass  # the records are lost this moment: nothing else is left of the claim
    try:
        atomic.mkdir_if_missing(folder)
        atomic.replace_file(f"{folder}/{record.token}", owner.encode_owner(record).encode())
    except (OSError, ValueError):
        return
