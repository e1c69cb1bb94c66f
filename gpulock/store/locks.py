# SPDX-License-Identifier: Apache-2.0
"""What is held: the records of claims, and the lock directories of their devices.

Hot. A claim has one record, `claims/TOKEN/record` beside LOCK_DIR, and for each of its devices a
lock directory `locks/ID` in LOCK_DIR. mkdir of that is the grant: it is atomic and fails when the
lock is there. `owner` in it is a copy of the record. A device is taken if a record or a lock names
it. `store.grants` changes them, `store.repair` puts back what is missing of either.
"""

import os
import stat

from gpulock.errors import BROKEN, UNKNOWN, Refusal, os_error_kind
from gpulock.store import atomic, kv, owner
from gpulock.store.owner import Owner

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

CLAIMS = ".claims"  # beside LOCK_DIR, and not in it: `rm -rf LOCK_DIR/*` is the likely accident
RECORD = "record"
# marks of a claim, beside its record
DRAINING, SEEN, ANCHORS, RELEASED, MPS = "draining", "seen", "anchors", "released", "mps"


def claims_root(lock_dir: str) -> str:
    """Return the folder of the records, of the gate, and of what decides on life and death."""
    return lock_dir + CLAIMS


class Lock:
    """One device that is held: the owner, or the `fault` of a lock that no record explains.

    `anchors` are (pid, start, supplementary group) of further shepherds, `seen` whether a Slurm
    job's extern step was ever seen; these, and `draining` of the owner, are empty until
    `read_details`.
    `mps` is gpulockd's word on the MPS of a share's card: `PID START`, or `! WHY` there is none.
    """

    def __init__(self, name: str, record: "Owner | None", fault: str) -> None:
        self.id = name
        self.owner = record
        self.fault = fault
        self.anchors: list[tuple[int, int, int]] = []
        self.seen = False
        self.mps = ""

    def shepherds(self) -> list[tuple[int, int]]:
        """Return (pid, start) of every recorded process that keeps the lock alive."""
        own = [(self.owner.pid, self.owner.start)] if self.owner else []
        return own + [anchor[:2] for anchor in self.anchors]

    def groups(self) -> list[int]:
        """Return the supplementary groups of the job's processes here."""
        own = [self.owner.add_grp_id] if self.owner else []
        return [gid for gid in own + [anchor[2] for anchor in self.anchors] if gid]


class LockStore:
    """The lock directory at `path`, and the records beside it; nothing is opened before it is
    asked for.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.root = root = claims_root(path)
        self.locks_dir = f"{path}/locks"
        self.claims_dir = f"{root}/claims"
        self.finished_dir = f"{root}/finished"

    def check(self, make: bool = False) -> None:
        """Raise Refusal unless both folders are ours and nobody else may write there.

        With `make` they are made where they are missing: /run is empty after a boot.
        """
        for path in (self.path, self.root):
            check_folder(path, make)

    def boot_id(self) -> str:
        """Return the boot in which these records were begun, or nothing; raise Refusal."""
        try:
            return atomic.read_text(f"{self.root}/boot_id").strip()
        except FileNotFoundError:
            return ""
        except OSError as fault:
            raise Refusal(UNKNOWN, f"boot_id: {fault}", f"look at {self.root}") from fault

    def read_all_locks(self, unreadable: "dict[str, str] | None" = None) -> dict[str, Lock]:
        """Return what is held, by id; raise Refusal where a folder cannot be read.

        Without the gate a claim may be seen that is being made, or undone. `unreadable` gets, by
        token, why a record stops every claim: it cannot be read, and no lock has its copy.
        """
        records, faults = self.read_records()
        held = locks_of_records(records)
        for name in list_names(self.locks_dir):
            if name not in held:
                held[name] = self.read(name)
        if faults and unreadable is not None:
            copied = {lock.owner.token for lock in held.values() if lock.owner}
            for token, why in faults.items():
                if isinstance(why, OSError) or token not in copied:
                    unreadable[token] = str(why)
        return dict(sorted(held.items()))

    def read_detailed_locks(self, unreadable: "dict[str, str] | None" = None) -> dict[str, Lock]:
        """Return the same with the details of each lock."""
        held = self.read_all_locks(unreadable)
        self.read_details(held.values())
        return held

    def read_records(self) -> "tuple[dict[str, Owner], dict[str, Exception]]":
        """Return the record of each claim by token, and why others cannot be read.

        One without a record is being removed, or its removal was cut short. Raises Refusal where
        the folder cannot be read.
        """
        records: dict[str, Owner] = {}
        faults: dict[str, Exception] = {}
        for token in list_names(self.claims_dir):
            try:
                records[token] = owner.parse_owner(self.read_record(token))
            except FileNotFoundError:
                continue
            except (OSError, kv.MalformedError) as fault:
                faults[token] = fault  # its locks tell; a repair writes it back
        return records, faults

    def read(self, name: str) -> Lock:
        """Return one lock by its own owner file; one that cannot be understood is a `fault`.

        An empty one is as none: who made it was granted nothing before it was written.
        """
        try:
            text = atomic.read_text(f"{self.locks_dir}/{name}/owner")
            if not text:
                return Lock(name, None, "")
            record = owner.parse_owner(text)
        except FileNotFoundError:
            return Lock(name, None, "")
        except (OSError, kv.MalformedError) as fault:
            what = "folder" if isinstance(fault, NotADirectoryError) else "owner record"
            return Lock(name, None, f"its {what}: {fault}")
        if name not in record.devices:
            return Lock(name, None, "its owner record names other devices")
        return Lock(name, record, "")

    def read_record(self, token: str) -> str:
        """Return the record of a claim as text; raise OSError."""
        data = atomic.read_head(f"{self.claims_dir}/{token}/{RECORD}", atomic.LIMIT)
        return data.decode("utf-8", "surrogateescape")

    def is_held(self, token: str, device: str = "") -> bool:
        """Return whether a claim has a record, which names `device`, or cannot be read."""
        try:
            record = owner.parse_owner(self.read_record(token))
        except FileNotFoundError:
            return False
        except (OSError, kv.MalformedError):
            return True
        return not device or device in record.devices

    def read_details(self, locks: "Iterable[Lock]") -> None:
        """Fill in anchors and marks, which only a judge and people need; of a claim they are read
        once.
        """
        read: dict[str, tuple[Lock, Owner]] = {}
        for lock in locks:
            record = lock.owner
            if record is None:
                continue
            first, known = read.setdefault(record.token, (lock, record))
            if first is lock:
                self._read_marks(lock, record)
            else:
                lock.mps, lock.seen, lock.anchors = first.mps, first.seen, first.anchors
                record.draining, lock.fault = known.draining, first.fault

    def _read_marks(self, lock: Lock, record: Owner) -> None:
        folder = f"{self.claims_dir}/{record.token}"
        lock.mps = self.read_mps(record.token)
        lock.seen = os.access(f"{folder}/{SEEN}", os.F_OK)
        record.draining = int(os.access(f"{folder}/{DRAINING}", os.F_OK))
        lock.anchors = []
        try:
            for name in os.listdir(f"{folder}/{ANCHORS}"):
                if name[0] != "." and (one := owner.read_anchor(f"{folder}/{ANCHORS}/{name}")):
                    lock.anchors.append(one)
        except FileNotFoundError:
            return
        except (OSError, ValueError) as fault:
            lock.fault = f"its anchors: {fault}"

    def read_mps(self, token: str) -> str:
        """Return gpulockd's word on the MPS of a claim's card, nothing where there is none yet."""
        try:
            return atomic.read_text(f"{self.claims_dir}/{token}/{MPS}").strip()
        except OSError:
            return ""

    def anchor(self, token: str, pid: int, start: int, gid: int) -> None:
        """Let one more shepherd, with the group of its task, keep a claim alive.

        It takes the place of an earlier task of that group: execd gives a group to one at a time.
        """
        folder = f"{self.claims_dir}/{token}/{ANCHORS}"
        atomic.mkdir_if_missing(folder)
        atomic.replace_file(f"{folder}/{gid or pid}", f"{pid} {start} {gid}\n".encode())

    def mark_seen(self, token: str) -> None:
        """Note that the extern step of a Slurm job was seen: from now on its absence counts."""
        atomic.append_file(f"{self.claims_dir}/{token}/{SEEN}")

    def mark_draining(self, token: str) -> None:
        """Note that a job is over, but not its processes; an empty file needs no room."""
        atomic.append_file(f"{self.claims_dir}/{token}/{DRAINING}")


def locks_of_records(records: dict[str, Owner]) -> dict[str, Lock]:
    """Return the locks of claims by id; those of a claim share its record."""
    held: dict[str, Lock] = {}
    for record in records.values():
        for name in record.devices:
            # one may be of two claims: root's doing, and both hold it
            held.setdefault(name, Lock(name, record, ""))
    return held


def check_folder(path: str, make: bool) -> None:
    """Raise Refusal unless a folder is ours and nobody else may write there; may make it."""
    try:
        info = os.lstat(path)
    except OSError as fault:
        if not make or not isinstance(fault, FileNotFoundError):
            kind = os_error_kind(fault)
            raise Refusal(kind, f"{path}: {fault.strerror}", "run gpulock doctor") from fault
        try:
            atomic.mkdir_if_missing(path)
            info = os.lstat(path)
        except OSError as failed:
            why = f"{path} cannot be created: {failed.strerror}"
            kind = os_error_kind(failed, BROKEN)
            raise Refusal(kind, why, "create it, owned by root, mode 0755") from failed
    if not stat.S_ISDIR(info.st_mode):
        raise Refusal(BROKEN, f"{path} is no directory", "remove it")
    if info.st_uid != os.geteuid() or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise Refusal(
            BROKEN,
            f"{path} has uid {info.st_uid}, mode {info.st_mode & 0o7777:o}",
            f"it must be uid {os.geteuid()}'s and writable by no other user",
        )


def list_names(folder: str) -> list[str]:
    """Return the names in a folder but the hidden ones, none where it is missing; raise Refusal."""
    try:
        return [name for name in os.listdir(folder) if name[0] != "."]
    except FileNotFoundError:
        return []
    except OSError as fault:
        raise Refusal(UNKNOWN, f"{folder}: {fault.strerror}", "run gpulock doctor") from fault
