# SPDX-License-Identifier: Apache-2.0
"""The lock directory: one directory a held device, made by mkdir, with the owner record inside.

Hot. Everything here but `check` is done with the gate held. mkdir is the grant: it is atomic and
fails when the lock is there. A lock leaves by one rename into `released/`. Beside `locks/`, its
owner record has a second name, `grant.ID`, made after the first and removed before it: where that
stands alone, the lock was lost, and is put back from it.
"""

import errno
import os
import stat
import time

from gpulock.errors import BROKEN, UNKNOWN, Refusal, lost_locks_refusal, os_error_kind
from gpulock.store import atomic, kv, owner
from gpulock.store.owner import Owner

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

LOST = "lost"  # a file that says that LOCK_DIR was lost in this boot, and filled again
GRANT = "grant."  # a second name of a lock's owner record begins with it
RELEASED_CAP = 1000  # released locks that wait for their history line
DROPPED = "dropped"  # how many were dropped since they were counted last
RELEASED_PRUNE = 500  # how many of the oldest go when the cap is reached


class Lock:
    """One lock as found: its owner, or the `fault` in its record; neither: a claim cut short.

    `anchors` are (pid, start, supplementary group) of further shepherds, `orphans` what stopped
    a reap, `seen` whether a Slurm job's extern step was ever seen; empty until `read_details`.
    `steps` are (pid, start) of a Slurm job's step daemons and processes, `extern` whether one is
    the daemon of the whole allocation; told by `Judge.attach`. `mps` is gpulockd's word on the MPS
    of a share's card: `PID START`, or `! WHY` there is none.
    """

    __slots__ = ("anchors", "extern", "fault", "id", "mps", "orphans", "owner", "seen", "steps")

    def __init__(self, name: str, record: "Owner | None", fault: str) -> None:
        self.id = name
        self.owner = record
        self.fault = fault
        self.anchors: list[tuple[int, int, int]] = []
        self.orphans = ""
        self.seen = False
        self.extern = False
        self.steps: list[tuple[int, int]] = []
        self.mps = ""

    def shepherds(self) -> list[tuple[int, int]]:
        """Return (pid, start) of every process that keeps the lock alive."""
        own = [(self.owner.pid, self.owner.start)] if self.owner else []
        return own + [anchor[:2] for anchor in self.anchors] + self.steps

    def groups(self) -> list[int]:
        """Return the supplementary groups of the job's processes here."""
        own = [self.owner.add_grp_id] if self.owner else []
        return [gid for gid in own + [anchor[2] for anchor in self.anchors] if gid]


class LockStore:
    """The lock directory at `path`; paths are made, nothing is opened before it is asked for.

    `root` is where it is found: the same, but with the gate held a path by the descriptor `fd`,
    which stays with one folder. `at` begins a path that is used together with `fd`.
    """

    __slots__ = ("at", "fd", "locks_dir", "path", "released_dir", "root")

    def __init__(self, path: str) -> None:
        self.path = path
        self.enter(None)

    def enter(self, fd: "int | None") -> None:
        """Let every path be below the folder that is open as `fd`; None: below LOCK_DIR's name."""
        self.fd = fd
        self.root = root = self.path if fd is None else f"/proc/self/fd/{fd}"
        self.at = f"{root}/" if fd is None else ""
        self.locks_dir = f"{root}/locks"
        self.released_dir = f"{root}/released"

    def check(self, make: bool = False) -> None:
        """Raise Refusal unless the directory is ours and nobody else may write there.

        With `make` it is made where it is missing: /run is empty after a boot.
        """
        try:
            info = os.lstat(self.path)
        except OSError as fault:
            if not make or not isinstance(fault, FileNotFoundError):
                kind = os_error_kind(fault)
                raise Refusal(kind, f"LOCK_DIR: {fault}", "run gpulock doctor") from fault
            try:
                atomic.mkdir_if_missing(self.path)
                info = os.lstat(self.path)
            except OSError as failed:
                why = f"LOCK_DIR cannot be created: {failed}"
                kind = os_error_kind(failed, BROKEN)
                raise Refusal(kind, why, "create it, owned by root, mode 0755") from failed
        if not stat.S_ISDIR(info.st_mode):
            raise Refusal(BROKEN, f"LOCK_DIR {self.path} is no directory", "remove it")
        if info.st_uid != os.geteuid() or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise Refusal(
                BROKEN,
                f"LOCK_DIR {self.path} has uid {info.st_uid}, mode {info.st_mode & 0o7777:o}",
                f"it must be uid {os.geteuid()}'s and writable by no other user",
            )

    def exists(self) -> bool:
        """Return whether any claim was ever made here; raise Refusal where that cannot be seen."""
        try:
            os.stat(self.locks_dir)
        except FileNotFoundError:
            return False
        except OSError as fault:
            raise Refusal(UNKNOWN, f"locks: {fault}", "look at LOCK_DIR") from fault
        return True

    def boot_id(self) -> str:
        """Return the boot in which this directory was made ready, or nothing."""
        try:
            return atomic.read_text(f"{self.at}boot_id", dir_fd=self.fd).strip()
        except FileNotFoundError:
            return ""
        except OSError as fault:
            raise Refusal(UNKNOWN, f"boot_id: {fault}", "look at LOCK_DIR") from fault

    def read_all_locks(self) -> dict[str, Lock]:
        """Return every lock by id; raise Refusal where the directory cannot be read."""
        try:
            names = sorted(os.listdir(self.locks_dir))
        except FileNotFoundError:
            raise lost_locks_refusal("the locks") from None
        except OSError as fault:
            raise Refusal(UNKNOWN, f"locks: {fault}", "look at LOCK_DIR") from fault
        return {name: self.read(name) for name in names if not name.startswith(".")}

    def read(self, name: str) -> Lock:
        """Return one lock; a record that cannot be read or understood is a `fault`."""
        try:
            text = atomic.read_text(f"{self.at}locks/{name}/owner", dir_fd=self.fd)
            return Lock(name, owner.parse_owner(text), "")
        except FileNotFoundError:
            return Lock(name, None, "")
        except (OSError, kv.MalformedError) as fault:
            return Lock(name, None, f"its owner record: {fault}")

    def read_details(self, lock: Lock) -> None:
        """Fill in anchors and orphans, which only a judge needs."""
        try:
            names = os.listdir(f"{self.locks_dir}/{lock.id}")
        except FileNotFoundError:
            return
        except OSError as fault:
            lock.fault = f"its folder: {fault}"
            return
        lock.seen = "seen" in names
        if "orphans" in names:
            lock.orphans = self._read_mark(lock.id, "orphans") or "unreadable"
        if "mps" in names:
            lock.mps = self._read_mark(lock.id, "mps")
        if "anchors" in names:
            try:
                folder = f"{self.locks_dir}/{lock.id}/anchors"
                found = [owner.read_anchor(folder, n) for n in os.listdir(folder) if n[0] != "."]
                lock.anchors = [anchor for anchor in found if anchor]
            except (OSError, ValueError) as fault:
                lock.fault = f"its anchors: {fault}"

    def _read_mark(self, name: str, mark: str) -> str:
        try:
            return atomic.read_text(f"{self.locks_dir}/{name}/{mark}").strip()
        except OSError:
            return ""

    def make(self, name: str, record: Owner) -> None:
        """Lock one device: mkdir, then the owner; raise OSError (EEXIST: it is held)."""
        self.make_text(name, owner.encode_owner(record))

    def make_text(self, name: str, text: str) -> None:
        """Lock one device for the owner that `text` describes."""
        folder, at = f"{self.at}locks/{name}", self.fd
        os.mkdir(folder, 0o755, dir_fd=at)
        atomic.replace_file(f"{folder}/owner", text.encode("utf-8"), dir_fd=at)
        try:
            os.link(f"{folder}/owner", f"{self.at}{GRANT}{name}", src_dir_fd=at, dst_dir_fd=at)
        except FileExistsError:
            atomic.remove_folder(f"{self.locks_dir}/{name}")
            raise OSError(errno.EBUSY, f"{name} was locked, and its lock was lost") from None

    def rewrite(self, name: str, record: Owner) -> None:
        """Replace the owner record of a lock that is held.

        Its second name goes first: killed in between, the lock has none, never an older record's.
        """
        data = owner.encode_owner(record).encode("utf-8")
        self.forget(name)
        atomic.replace_file(f"{self.locks_dir}/{name}/owner", data)
        self.keep(name)

    def undo(self, name: str) -> None:
        """Take back a lock made a moment ago by this process; what fails is reaped later.

        The second name of another claim's record stays: its lock was lost, and is put back.
        """
        record, second = f"{self.locks_dir}/{name}/owner", f"{self.root}/{GRANT}{name}"
        try:
            try:
                if os.path.samestat(os.lstat(record), os.lstat(second)):
                    self.forget(name)
            except FileNotFoundError:
                pass
            atomic.remove_folder(f"{self.locks_dir}/{name}")
        except OSError:
            return

    def keep(self, name: str) -> None:
        """Give the owner record of a lock its second name; raise OSError."""
        os.link(f"{self.locks_dir}/{name}/owner", f"{self.root}/{GRANT}{name}")

    def forget(self, name: str) -> None:
        """Let a lock go for good: lost from now on, it is not put back; raise OSError."""
        try:
            os.unlink(f"{self.at}{GRANT}{name}", dir_fd=self.fd)
        except FileNotFoundError:
            return

    def find_lost(self, held: dict[str, Lock]) -> tuple[list[str], bool]:
        """Return the ids whose lock, or its record, is gone, but not by us; raise Refusal.

        And whether LOCK_DIR itself was lost in this boot. `held` are all locks, read before.
        """
        try:
            names = os.listdir(self.root)
        except OSError as fault:
            raise Refusal(UNKNOWN, f"LOCK_DIR: {fault}", "look at LOCK_DIR") from fault
        granted = [name[len(GRANT) :] for name in names if name.startswith(GRANT)]
        whole = [name for name, lock in held.items() if lock.owner or lock.fault]
        return sorted([name for name in granted if name not in whole]), LOST in names

    def check_token(self, names: "Iterable[str]", token: str) -> None:
        """Raise Refusal(UNKNOWN) unless all these devices are locked by this claim; no gate.

        To be called when a record of the claim is kept: LOCK_DIR may have been lost before that,
        and filled again without it. One that is lost later is filled again by the record.
        """
        for name in names:
            try:
                text = atomic.read_text(f"{self.locks_dir}/{name}/owner")
            except OSError:
                text = ""
            if f"\ntoken={token}\n" not in text:
                raise Refusal(UNKNOWN, f"the lock of {name} was lost meanwhile", "try again")

    def anchor(self, name: str, pid: int, start: int, gid: int) -> None:
        """Let one more shepherd, with the group of its task, keep the lock alive."""
        folder = f"{self.locks_dir}/{name}/anchors"
        atomic.mkdir_if_missing(folder)
        atomic.replace_file(f"{folder}/{pid}.{start}", f"{gid}\n".encode())

    def drop_anchor(self, name: str, pid: int, start: int) -> None:
        """Forget a shepherd that is over; one that cannot be forgotten does no harm."""
        atomic.remove_quietly(f"{self.locks_dir}/{name}/anchors/{pid}.{start}")

    def mark_seen(self, name: str) -> None:
        """Note that the extern step of its Slurm job was seen: from now on its absence counts."""
        atomic.replace_file(f"{self.locks_dir}/{name}/seen", b"seen\n")

    def mark_orphans(self, name: str, text: str) -> None:
        """Note which processes kept a dead owner's device open."""
        atomic.replace_file(f"{self.locks_dir}/{name}/orphans", text.encode() + b"\n")

    def retire(self, lock: Lock, how: str, boot_id: str = "") -> None:
        """Free a device: rename its lock into `released/`; raise OSError.

        The token is compared first, so that a lock made anew since it was judged stays. Of a lock
        of another boot than `boot_id` it is not noted when that is by CLOCK_BOOTTIME.
        """
        ours = lock.owner.token if lock.owner else None
        if lock.fault or not self.has_token(lock.id, ours):
            raise Refusal(UNKNOWN, f"the lock of {lock.id} changed meanwhile", "try again")
        if ours is None:
            if os.path.lexists(f"{self.root}/{GRANT}{lock.id}"):
                raise lost_locks_refusal(f"the locks of {lock.id}")
            atomic.remove_folder(f"{self.locks_dir}/{lock.id}")
            return
        folder, at = f"{self.at}locks/{lock.id}", self.fd
        times = [("released_at", f"{time.time():.3f}")]
        if lock.owner is None or boot_id in ("", lock.owner.boot_id):
            boottime = time.clock_gettime(time.CLOCK_BOOTTIME)
            times.append(("released_boottime", f"{boottime:.3f}"))
        try:  # first: a process killed in between frees nothing
            data = kv.encode_pairs([*times, ("how", how)]).encode()
            atomic.replace_file(f"{folder}/released", data, dir_fd=at)
        except (OSError, ValueError):
            pass  # the history lacks when and how
        self.forget(lock.id)
        target = f"{self.at}released/{ours}.{lock.id}"
        os.rename(folder, target, src_dir_fd=at, dst_dir_fd=at)
        try:
            if atomic.count_folders(self.released_dir) >= RELEASED_CAP:
                self.prune()
        except OSError:
            return

    def has_token(self, name: str, token: "str | None") -> bool:
        """Return whether a lock has this token, or for None no owner; raise OSError."""
        try:
            text = atomic.read_text(f"{self.at}locks/{name}/owner", dir_fd=self.fd)
        except FileNotFoundError:
            return token is None
        return token is not None and f"\ntoken={token}\n" in text

    def is_lost(self, name: str, token: str) -> bool:
        """Return whether a claim's lock is lost, or may be, given that it is not there."""
        try:
            return f"\ntoken={token}\n" in atomic.read_text(f"{self.root}/{GRANT}{name}")
        except FileNotFoundError:
            return False
        except OSError:
            return True

    def prune(self) -> None:
        """Drop the oldest released locks; raise OSError."""
        names = os.listdir(self.released_dir)
        names.sort(key=lambda name: os.lstat(f"{self.released_dir}/{name}").st_mtime)
        del names[RELEASED_PRUNE:]
        self.note_dropped(len(names))
        for name in names:
            atomic.remove_folder(f"{self.released_dir}/{name}")

    def note_dropped(self, count: int) -> None:
        """Count what goes without a line in the history; what cannot be counted goes all the same.

        One byte each, since only some of its callers have the counters at hand.
        """
        try:
            atomic.append_file(f"{self.root}/{DROPPED}", b"." * count)
        except OSError:
            return
