# SPDX-License-Identifier: Apache-2.0
"""Take what is over out of LOCK_DIR/released into the history: one line a claim, none twice.

Warm, and the one author of the history: gpulockd, or `gpulock reap` where it does not run. A line
is made durable before the released locks go, and a claim that is found there again is looked for
in the history first. So a crash at any instruction loses no claim and writes none twice; a claim
that cannot be written waits in `released/`. One of which LOCK_DIR does not know any more is told
by its record in STATE_DIR (gpulock.daemon.history.pending).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Set
from typing import ClassVar, Final

from gpulock.alloc.reaper import FREED
from gpulock.daemon.history import files, pending
from gpulock.daemon.history.claim_samples import ExporterSamples
from gpulock.daemon.history.record import ClaimedDevice, build_history_record, encode_history_record
from gpulock.daemon.reconcile.reconcile import ReconcileReport
from gpulock.daemon.reconcile.schedule import ROUND, Chore, Due
from gpulock.deadline import Deadline, clock_boottime
from gpulock.errors import Refusal
from gpulock.node import sample
from gpulock.node.context import Node
from gpulock.node.devices import Device
from gpulock.node.sample import is_claim_token
from gpulock.store import atomic, kv, owner
from gpulock.store.gate import Gate
from gpulock.store.locks import LockStore
from gpulock.store.verdicts import PERIOD

GATE_SECONDS: Final = 5.0
BATCH: Final = 64  # claims that are made durable at once

Say = Callable[[str], None]
Claims = dict[str, dict[str, ClaimedDevice]]  # by token, by device


class HistoryWriter(Chore):
    """The chore that follows a reconcile; `say` is told each fault once while it lasts."""

    after: ClassVar[Due] = {ROUND: ()}

    def __init__(self, say: Say) -> None:
        self._say = say
        self._said: set[str] = set()
        self._left: set[str] = set()  # written, and not yet gone from `released/`
        self._sought: set[str] = set()  # of those without a note, looked for in that history
        self._file = (0, 0)  # the history as this process left it
        self._saw = -PERIOD  # when it was noted last which claims stand

    def run(self, node: Node, report: ReconcileReport, now: float) -> None:
        """Write what is over; `now` is CLOCK_BOOTTIME in seconds."""
        left = [one.lock.owner for one in report.outcomes if one.act != FREED]
        standing = {record.token: record for record in left if record}
        if now - self._saw >= PERIOD:
            here = [one for one in standing.values() if one.boot_id == node.boot_id]
            pending.touch_last_seen(node.settings.state_dir, here, time.time(), clock_boottime())
            self._saw = now
        self.write_finished_claims(node, report.devices, standing.keys())

    def write_finished_claims(
        self, node: Node, devices: Iterable[Device] = (), standing: Set[str] = frozenset()
    ) -> int:
        """Write what is over; return how many lines.

        `devices` are those the driver shows, `standing` tokens of claims that are not over.
        """
        faults: set[str] = set()
        lines = 0
        try:
            found = read_released_claims(node.store, faults)
            found |= pending.find_lost_claims(node, found.keys() | standing, faults, time.time())
            if found:
                known = {device.id: device for device in devices}
                lines = self._write(node, found, known, faults)
        except (OSError, Refusal) as failed:
            why = failed.why if isinstance(failed, Refusal) else str(failed)
            faults.add(f"the history of finished claims waits in {node.store.released_dir}: {why}")
        for fault in sorted(faults - self._said):
            self._say(fault)
        self._said = faults
        return lines

    def _write(
        self, node: Node, found: Claims, devices: Mapping[str, Device], faults: set[str]
    ) -> int:
        advice = ExporterSamples(node.settings.exporter_dir)
        ready = {
            token: parts
            for token, parts in found.items()
            if is_claim_fully_released(node.store, token, parts)
            and not awaits_exporter_account(advice, parts)
        }
        if not ready:
            return 0
        now = time.time()
        ready = {
            token: pending.correct_reboot_ends(node, parts, now) for token, parts in ready.items()
        }
        folder = f"{node.settings.state_dir}/{files.FOLDER}"
        path = f"{folder}/{files.NAME}"
        files.make_history_folder(folder)
        with Gate(folder, Deadline(GATE_SECONDS)):
            done = self._find_written_claims(folder, path, ready)
            remove_written_claims(node, {token: ready[token] for token in done})
            new = sorted(
                set(ready) - done, key=lambda token: (last_release_time(ready[token]), token)
            )
            count = 0
            for begin in range(0, len(new), BATCH):
                lines: dict[str, bytes] = {}
                for token in new[begin : begin + BATCH]:
                    try:
                        parts = list(ready[token].values())
                        lines[token] = encode_history_record(
                            build_history_record(parts, advice, devices)
                        )
                    except (ValueError, OverflowError) as fault:
                        faults.add(f"claim {token} has no line: {fault}; remove it from released")
                files.append_history_lines(path, b"".join(lines.values()))
                self._left |= set(lines)
                self._file = history_file_identity(path)
                remove_written_claims(node, {token: ready[token] for token in lines})
                count += len(lines)
            self._left &= set(ready)
            self._sought &= set(ready)
        return count

    def _find_written_claims(self, folder: str, path: str, ready: Claims) -> set[str]:
        """Return the claims whose line is there already."""
        unnoted = {token for token, parts in ready.items() if not has_noted_ends(parts)}
        same = self._file != (0, 0) and self._file == history_file_identity(path)
        if same and unnoted <= self._sought:
            return self._left & set(ready)
        oldest = min(earliest_claim_end(parts) for parts in ready.values())
        self._left = files.find_written_tokens(folder, set(ready), oldest)
        self._sought = unnoted
        self._file = history_file_identity(path)
        return set(self._left)


def history_file_identity(path: str) -> tuple[int, int]:
    """Return inode and size of a file, zeros where there is none."""
    try:
        info = os.lstat(path)
    except FileNotFoundError:
        return 0, 0
    return info.st_ino, info.st_size


def read_released_claims(store: LockStore, faults: set[str]) -> Claims:
    """Return the released locks by claim; what cannot be read is a fault, and stays.

    A folder without owner is one whose removal was cut short. One without its note may be a
    release at work this very moment, so the gate is waited for once.
    """
    try:
        names = os.listdir(store.released_dir)
    except FileNotFoundError:
        return {}
    found: Claims = {}
    bare: list[str] = []
    for name in names:
        part = try_read_released_lock(store, name, faults)
        if part is None:
            continue
        if not part.how and part.boottime is None:
            bare.append(name)
            continue
        found.setdefault(part.owner.token, {})[part.device] = part
    if bare:
        with Gate(store.path, Deadline(GATE_SECONDS)):
            pass  # whoever was releasing has finished
        for name in bare:
            part = try_read_released_lock(store, name, faults)
            if part is not None:
                found.setdefault(part.owner.token, {})[part.device] = part
    return found


def try_read_released_lock(store: LockStore, name: str, faults: set[str]) -> ClaimedDevice | None:
    """Return one released lock, None for one that is no more, or cannot be read."""
    folder = f"{store.released_dir}/{name}"
    try:
        return read_released_lock(store, name)
    except FileNotFoundError:
        remove_released_lock(folder, faults)
    except (OSError, kv.MalformedError) as fault:
        faults.add(f"{folder} cannot be read: {fault}; remove it")
    return None


def read_released_lock(store: LockStore, name: str) -> ClaimedDevice:
    """Return one released lock; raise OSError, or kv.MalformedError where it makes no sense."""
    token, _, device = name.partition(".")
    record = owner.parse_owner(atomic.read_text(f"{store.released_dir}/{name}/owner"))
    if record.token != token or not is_claim_token(token):
        raise kv.MalformedError(f"it has the record of claim {record.token[:40]!r}")
    at, noted_at, how = read_release_note(f"{store.released_dir}/{name}")
    if noted_at is not None:
        return ClaimedDevice(device, record, at, noted_at, how)
    most = (
        clock_boottime() - record.claimed_boottime
    )  # of this boot; see `owed.of_this_boot` for others
    return ClaimedDevice(device, record, at, None, how, min(at - record.claimed_at, most))


def read_release_note(folder: str) -> tuple[float, float | None, str]:
    """Return when (epoch, CLOCK_BOOTTIME) and how a lock was released.

    Where the note is missing or cut short: when the folder was moved, and nothing.
    """
    try:
        note = kv.decode_pairs(atomic.read_text(f"{folder}/released"))
        at, how = sample.parse_sample_real(note["released_at"]), note["how"]
        boottime = note.get("released_boottime")
        return at, sample.parse_sample_real(boottime) if boottime else None, how
    except (OSError, ValueError, KeyError):
        try:
            return os.lstat(folder).st_ctime, None, ""
        except FileNotFoundError:
            return time.time(), None, ""


def is_claim_fully_released(store: LockStore, token: str, parts: dict[str, ClaimedDevice]) -> bool:
    """Return whether no device of a claim is held any more; add what came meanwhile.

    A lock moves from `locks/` to `released/`, never back: looked for in this order, it is not
    missed.
    """
    grant = next(iter(parts.values())).owner.devices
    for device in grant:
        if device in parts:
            continue
        lock = store.read(device)
        if lock.fault or (lock.owner and lock.owner.token == token):
            return False
        part = try_read_released_lock(store, f"{token}.{device}", set())
        if part is not None:
            parts[device] = part
    return True


def awaits_exporter_account(advice: ExporterSamples, parts: Mapping[str, ClaimedDevice]) -> bool:
    """Return whether the exporter has yet to say what the devices did."""
    last = max(parts.values(), key=lambda part: part.at)
    return advice.may_come(last.owner, last.at, time.time())


def has_noted_ends(parts: Mapping[str, ClaimedDevice]) -> bool:
    """Return whether the end of every device of a claim was noted."""
    return all(part.boottime is not None for part in parts.values())


def earliest_claim_end(parts: Mapping[str, ClaimedDevice]) -> float:
    """Return when a claim may have ended at the earliest (epoch)."""
    return (
        last_release_time(parts)
        if has_noted_ends(parts)
        else min(p.owner.claimed_at for p in parts.values())
    )


def last_release_time(parts: Mapping[str, ClaimedDevice]) -> float:
    """Return when the last device of a claim was released."""
    return max(part.at for part in parts.values())


def remove_written_claims(node: Node, claims: Mapping[str, Iterable[str]]) -> None:
    """Remove what is left of claims whose line is written; what stays is not written again."""
    for token, devices in claims.items():
        for device in devices:
            remove_released_lock(f"{node.store.released_dir}/{token}.{device}", set())
        pending.remove_pending_record(node.settings.state_dir, token)


def remove_released_lock(folder: str, faults: set[str]) -> None:
    """Remove a released lock; its owner last, so that one cut short is still known."""
    try:
        atomic.remove_quietly(f"{folder}/released")
        atomic.remove_folder(folder)
    except FileNotFoundError:
        return
    except OSError as fault:
        faults.add(f"{folder} cannot be removed: {fault.strerror}")
