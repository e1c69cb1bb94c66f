# SPDX-License-Identifier: Apache-2.0
"""Claims that are over and have no line in the history yet: what LOCK_DIR and STATE_DIR tell.

Warm. A released lock waits in LOCK_DIR/released. A record in STATE_DIR (PENDING_FOLDER) is made
with its claim (store.claim_records), and goes when its line is written. As long as LOCK_DIR knows
a claim, as a lock or as a released one, its record only waits. Where the node went down, or
LOCK_DIR was lost, the record is all that is left: its claim is over, and was held at least until
it was last seen, which is when the file was last touched.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping

from gpulock.daemon.history.record import ClaimedDevice
from gpulock.deadline import Deadline, clock_boottime
from gpulock.node.context import Node
from gpulock.node.sample import is_claim_token, parse_sample_real
from gpulock.store import atomic, kv, owner
from gpulock.store.claim_records import PENDING_FOLDER
from gpulock.store.gate import Gate
from gpulock.store.locks import LockStore
from gpulock.store.owner import Owner

GATE_SECONDS = 5.0
MIN_SEEN_SECONDS = 5.0  # within them a record is written; one seen no later was never seen
CLOCK_SET = 60.0  # seconds by which a clock is off that was set since the claim
EMPTY_SECONDS = 60.0  # the process that makes a record has written it by then
REBOOT_PROOF = "reap: claimed before this boot; its end is when it was last seen"

EndedClaims = dict[str, dict[str, ClaimedDevice]]  # by token, by device


def read_released_claims(store: LockStore, faults: set[str]) -> EndedClaims:
    """Return the released locks by claim; what cannot be read is a fault, and stays.

    A folder without owner is one whose removal was cut short. One without its note may be a
    release at work this very moment, so the gate is waited for once.
    """
    try:
        names = os.listdir(store.released_dir)
    except FileNotFoundError:
        return {}
    parts = {name: read_released_lock(store, name, faults) for name in names}
    bare = [name for name, part in parts.items() if part and not part.how and not part.noted]
    if bare:
        with Gate(store, Deadline(GATE_SECONDS)):
            pass  # a release at work has finished
        parts |= {name: read_released_lock(store, name, faults) for name in bare}
    found: EndedClaims = {}
    for name, part in parts.items():
        if part is None and not os.path.lexists(f"{store.released_dir}/{name}/owner"):
            remove_released_lock(f"{store.released_dir}/{name}", faults)
        elif part is not None and part.owner.is_health_check():
            remove_released_lock(f"{store.released_dir}/{name}", faults)  # nobody's use
        elif part is not None:
            found.setdefault(part.owner.token, {})[part.device] = part
    return found


def read_released_lock(store: LockStore, name: str, faults: set[str]) -> ClaimedDevice | None:
    """Return one released lock, None for one that is no more, or cannot be read: that is a fault.

    Where its note is missing or cut short, it was released when the folder was moved.
    """
    folder = f"{store.released_dir}/{name}"
    token, _, device = name.partition(".")
    try:
        record = owner.parse_owner(atomic.read_text(f"{folder}/owner"))
        if record.token != token or not is_claim_token(token):
            raise kv.MalformedError(f"it has the record of claim {record.token[:40]!r}")
    except FileNotFoundError:
        return None
    except (OSError, kv.MalformedError) as fault:
        faults.add(f"{folder} cannot be read: {fault}; remove it")
        return None
    held: float | None = None
    noted = False
    try:
        note = kv.decode_pairs(atomic.read_text(f"{folder}/released"))
        at, how = parse_sample_real(note["released_at"]), note["how"]
        if note.get("released_boottime"):
            held = parse_sample_real(note["released_boottime"]) - record.claimed_boottime
            noted = True
    except (OSError, ValueError, KeyError):
        how = ""
        try:
            at = os.lstat(folder).st_ctime
        except FileNotFoundError:
            at = time.time()
    if held is None:  # in this boot; see correct_reboot_ends
        held = min(at - record.claimed_at, clock_boottime() - record.claimed_boottime)
    return ClaimedDevice(device, record, at, how, held if held >= 0 else None, noted)


def touch_last_seen(state_dir: str, standing: Iterable[Owner], wall: float, now: float) -> None:
    """Note that claims stand now; one without a record, or on a full disk, goes unnoted.

    `wall` is the epoch, `now` CLOCK_BOOTTIME. The time of a claim is held against that of the
    file: where the clock was set since the claim, the former is corrected as well.
    """
    for record in standing:
        if not is_claim_token(record.token):
            continue
        path = f"{state_dir}/{PENDING_FOLDER}/{record.token}"
        begun = wall - now + record.claimed_boottime
        try:
            if abs(begun - record.claimed_at) > CLOCK_SET:
                kept = owner.parse_owner(atomic.read_text(path))
                if abs(begun - kept.claimed_at) > CLOCK_SET:
                    text = owner.encode_owner(kept.copy(claimed_at=begun))
                    atomic.replace_file(path, text.encode(), durable=True)  # as the old one is
            os.utime(path, (wall, wall), follow_symlinks=False)
        except (OSError, kv.MalformedError):
            continue


def correct_reboot_ends(
    node: Node, parts: Mapping[str, ClaimedDevice], now: float
) -> dict[str, ClaimedDevice]:
    """Return a claim's parts with an end that is known, or is told to be unknown.

    Where a reboot ended a claim whose LOCK_DIR was kept, its locks were freed in another boot: by a
    clock that says nothing of the claim's, after a time in which the node may have been off.
    """
    if all(part.noted or part.owner.boot_id == node.boot_id for part in parts.values()):
        return dict(parts)
    token = next(iter(parts.values())).owner.token
    try:
        record, seen = read_pending_record(f"{node.settings.state_dir}/{PENDING_FOLDER}", token)
    except (OSError, kv.MalformedError):
        record, seen = None, now
    least = least_held_seconds(record, seen) if record else None
    return {
        device: part
        if part.noted or part.owner.boot_id == node.boot_id
        else part._replace(at=clamp_claim_end(part.owner, seen, now), held=least)
        for device, part in parts.items()
    }


def clamp_claim_end(record: Owner, seen: float, now: float) -> float:
    """Return when a claim is told to have ended: not after `now`, and not before it began.

    A file's time is the kernel's coarse clock, some milliseconds behind that of the claim.
    """
    return min(max(seen, record.claimed_at), now)


def least_held_seconds(record: Owner, seen: float) -> float | None:
    """Return for how long a claim was held at least that was last seen at `seen` (epoch).

    None for one that nobody saw again, and where a clock was set in between.
    """
    least = seen - record.claimed_at
    return least if least > MIN_SEEN_SECONDS else None


def find_lost_claims(node: Node, names: Iterable[str], faults: set[str], now: float) -> EndedClaims:
    """Return the claims of which nothing but the record is left, by token and device.

    `names` are records of claims that LOCK_DIR was just seen not to have; `now` is the epoch. What
    cannot be read is a fault, and stays.
    """
    folder = f"{node.settings.state_dir}/{PENDING_FOLDER}"
    found: EndedClaims = {}
    for name in names:
        try:
            record, seen = read_pending_record(folder, name)
        except FileNotFoundError:
            continue
        except (OSError, kv.MalformedError) as fault:
            faults.add(f"{folder}/{name} cannot be read: {fault}; remove it")
            continue
        if record is None:
            if now - seen > EMPTY_SECONDS:
                atomic.remove_quietly(f"{folder}/{name}")
        elif not is_claim_in_lock_dir(node.store, record):
            found[name] = lost_claim_devices(record, seen, now, node.boot_id)
        elif record.boot_id == node.boot_id and has_unreadable_lock(node.store, record):
            touch_last_seen(node.settings.state_dir, [record], now, clock_boottime())
    # a LOCK_DIR that is lost this moment has not been filled again yet
    return found if node.store.boot_id() == node.boot_id else {}


def read_pending_record(folder: str, name: str) -> tuple[Owner | None, float]:
    """Return a record and when its claim was last seen (epoch); raise OSError or MalformedError.

    None for one that is being written, or whose write was cut short by a kill or a power cut.
    """
    path = f"{folder}/{name}"
    info = os.lstat(path)
    if info.st_uid != os.geteuid():
        raise PermissionError(f"it belongs to uid {info.st_uid}, not to uid {os.geteuid()}")
    text = atomic.read_text(path)
    if owner.is_cut_short(text):
        return None, info.st_mtime
    record = owner.parse_owner(text)
    if record.token != name or not is_claim_token(name) or not record.devices:
        raise kv.MalformedError(f"it has the record of claim {record.token[:40]!r}")
    return record, info.st_mtime


def is_claim_in_lock_dir(store: LockStore, record: Owner) -> bool:
    """Return whether LOCK_DIR still tells of a claim, be it of a lock that is lost.

    A lock moves from `locks/` to `released/`, never back: looked for in this order, it is not
    missed. Its record is made after the first of its locks.
    """
    for device in record.devices:
        lock = store.read(device)
        if lock.fault or (lock.owner and lock.owner.token == record.token):
            return True
        if store.is_lost(device, record.token):
            return True
    return any(
        os.path.lexists(f"{store.released_dir}/{record.token}.{device}")
        for device in record.devices
    )


def has_unreadable_lock(store: LockStore, record: Owner) -> bool:
    """Return whether a device of a claim has a lock that cannot be read: it may be the claim's."""
    return any(store.read(device).fault for device in record.devices)


def lost_claim_devices(
    record: Owner, seen: float, now: float, boot_id: str
) -> dict[str, ClaimedDevice]:
    """Return what is known of each device of a claim that was last seen at `seen` (epoch)."""
    how = REBOOT_PROOF if record.boot_id != boot_id else ""
    part = ClaimedDevice(
        "", record, clamp_claim_end(record, seen, now), how, least_held_seconds(record, seen)
    )
    return {device: part._replace(device=device) for device in record.devices}


def is_claim_fully_released(store: LockStore, token: str, parts: dict[str, ClaimedDevice]) -> bool:
    """Return whether no device of a claim is held any more; add what came meanwhile.

    A lock moves from `locks/` to `released/`, never back: looked for in this order, it is not
    missed.
    """
    for device in next(iter(parts.values())).owner.devices:
        if device in parts:
            continue
        lock = store.read(device)
        if lock.fault or (lock.owner and lock.owner.token == token):
            return False
        if store.is_lost(device, token):
            return False
        part = read_released_lock(store, f"{token}.{device}", set())
        if part is not None:
            parts[device] = part
    return True


def remove_written_claims(node: Node, claims: Mapping[str, Iterable[str]]) -> None:
    """Remove what is left of claims whose line is written; what stays is not written again."""
    for token, devices in claims.items():
        for device in devices:
            remove_released_lock(f"{node.store.released_dir}/{token}.{device}", set())
        atomic.remove_quietly(f"{node.settings.state_dir}/{PENDING_FOLDER}/{token}")


def remove_released_lock(folder: str, faults: set[str]) -> None:
    """Remove a released lock; its owner last, so that one cut short is still known."""
    try:
        atomic.remove_quietly(f"{folder}/released")
        atomic.remove_folder(folder)
    except FileNotFoundError:
        return
    except OSError as fault:
        faults.add(f"{folder} cannot be removed: {fault.strerror}")
