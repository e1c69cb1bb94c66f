# SPDX-License-Identifier: Apache-2.0
"""Records of claims in STATE_DIR, for when LOCK_DIR is lost: one file a claim.

Hot. `runs/`: for adoption within a boot, of claims that have no spool directory to keep theirs in
(Slurm's, and `gpulock run`'s). `owed/`: of every claim, until its line is in the history, so that
a reboot loses none. The writer of the line removes the record.
"""

import os

from gpulock.store import atomic, kv, owner
from gpulock.store.locks import RELEASED_PRUNE, LockStore
from gpulock.store.owner import Owner

FOLDER, PENDING_FOLDER = "runs", "owed"
WITHOUT = "the claim has no record there, and its line in the history is lost by a reboot"
PENDING_CAP = 1000  # records that are kept over a boot


def write_claim_record(state_dir: str, record: Owner) -> str:
    """Note a claim for a later adoption; return the file's path; raise OSError."""
    data = owner.encode_owner(record).encode("utf-8")
    path = f"{state_dir}/{FOLDER}/{record.token}"
    try:
        atomic.replace_file(path, data)
    except FileNotFoundError:
        os.makedirs(f"{state_dir}/{FOLDER}", 0o755, exist_ok=True)
        atomic.replace_file(path, data)
    return path


def write_record_or_mark(state_dir: str, record: Owner) -> tuple[str, str]:
    """Note a claim for a later adoption; return the file's path, or none and why; raise OSError.

    A full disk is no fault of this node's: the lock stands in LOCK_DIR, and it is noted that a
    record is missing. Where not even that can be noted the claim has no way to go on.
    """
    try:
        return write_claim_record(state_dir, record), ""
    except OSError as fault:
        if fault.errno not in atomic.FULL:
            raise
        from gpulock.store import adoption_state

        adoption_state.mark_record_missing(state_dir)
        return "", f"STATE_DIR {state_dir}: {fault.strerror}: {WITHOUT}"


def drop_device_from_record(state_dir: str, record: Owner, device: str) -> None:
    """Take a device out of its claim's record, before its lock goes: nobody adopts it again.

    Where there is no room for that the record goes, and it is noted that one is missing; where
    even that is not possible it stays: it locks too much, never too little.
    """
    path = f"{state_dir}/{FOLDER}/{record.token}"
    left: tuple[str, ...] = ()
    try:
        if record.devices != (device,):
            kept = owner.parse_owner(atomic.read_text(path))
            left = tuple([name for name in kept.devices if name != device])
        if left:
            write_claim_record(state_dir, record.copy(devices=left))
            return
    except FileNotFoundError:
        return
    except OSError as fault:
        if fault.errno in atomic.FULL:
            from gpulock.store import adoption_state

            try:
                adoption_state.mark_record_missing(state_dir)
            except OSError:
                return
    except kv.MalformedError:
        pass  # whatever it is, it is no claim to come back to
    atomic.remove_quietly(path)


def record_pending_history(
    state_dir: str, lock_dir: str, record: Owner, kept: str, dir_fd: "int | None" = None
) -> None:
    """Note that a claim will be owed a line of the history; what fails here fails no job.

    `kept` is its record for adoption, below `dir_fd` where that is given. Where released locks
    pile up nobody writes a history: these records would pile up as well.
    """
    folder = f"{state_dir}/{PENDING_FOLDER}"
    try:
        try:
            if atomic.count_folders(f"{lock_dir}/released") >= RELEASED_PRUNE:
                return
        except FileNotFoundError:
            pass  # LOCK_DIR was lost: nothing else is left of the claim
        path = f"{folder}/{record.token}"
        for attempt in range(2):
            try:
                os.link(kept, path, src_dir_fd=dir_fd, follow_symlinks=False)
            except FileNotFoundError:
                if attempt:
                    raise
                atomic.mkdir_if_missing(folder)  # another claim does the same
            except OSError:  # on another file system: a copy, which costs ten times as much
                atomic.create_file(path, owner.encode_owner(record).encode("utf-8"))
                return
            else:
                return
    except (OSError, ValueError):
        return


def limit_pending_records(state_dir: str, store: LockStore) -> None:
    """Drop the oldest records once there are too many, as far as that is possible; count them."""
    folder = f"{state_dir}/{PENDING_FOLDER}"
    try:
        names = [name for name in os.listdir(folder) if name[0] != "."]
        names.sort(key=lambda name: os.lstat(f"{folder}/{name}").st_mtime)
    except OSError:
        return
    if len(names) > PENDING_CAP:
        del names[-PENDING_CAP:]
        store.note_dropped(len(names))
        for name in names:
            atomic.remove_quietly(f"{folder}/{name}")
