# SPDX-License-Identifier: Apache-2.0
"""Claims that are over and have no line in the history yet: what their records tell.

Warm. A claim that is over waits in `finished/`. Its copy in STATE_DIR (store.owed) is made with it,
and goes when its line is written. As long as there is a record of the claim the copy only waits.
Where the node went down, or the records were lost, the copy is all that is left: its claim is over,
and was held at least until it was last seen, which is when the file was last touched.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from gpulock.daemon.history.record import ClaimedDevice
from gpulock.deadline import clock_boottime
from gpulock.node.context import Node
from gpulock.node.sample import is_claim_token, parse_sample_real
from gpulock.store import atomic, kv, owner
from gpulock.store.locks import RECORD, RELEASED, LockStore
from gpulock.store.owed import FOLDER
from gpulock.store.owner import Owner

MIN_SEEN_SECONDS = 5.0  # within them a record is written; one seen no later was never seen
CLOCK_SET = 60.0  # seconds by which a clock is off that was set since the claim
RELEASED_LIMIT = 1 << 18  # bytes: a line for each of 128 instances
EMPTY_SECONDS = 60.0  # the process that makes a record has written it by then
REBOOT = "reap: claimed before this boot"
REBOOT_PROOF = f"{REBOOT}; its end is when it was last seen"

EndedClaims = dict[str, dict[str, ClaimedDevice]]  # by token, by device


def read_finished_claims(store: LockStore, faults: set[str]) -> EndedClaims:
    """Return the finished claims by token and device; what cannot be read is a fault, and stays."""
    try:
        names = os.listdir(store.finished_dir)
    except FileNotFoundError:
        return {}
    found: EndedClaims = {}
    for name in names:
        parts = read_finished_claim(store, name, faults)
        if not parts:
            if not has_whole_record(store, name):
                remove_finished_claim(store, name, faults)
        elif next(iter(parts.values())).owner.is_health_check():
            remove_finished_claim(store, name, faults)  # nobody's use
        else:
            found[name] = parts
    return found


def has_whole_record(store: LockStore, token: str) -> bool:
    """Return whether a finished claim's record was cut short by nothing.

    It is missing where a removal was, and lacks its end or has zeros after a power cut.
    """
    try:
        return not owner.is_cut_short(atomic.read_text(f"{store.finished_dir}/{token}/{RECORD}"))
    except FileNotFoundError:
        return False
    except OSError:
        return True


def read_finished_claim(store: LockStore, token: str, faults: set[str]) -> dict[str, ClaimedDevice]:
    """Return one finished claim by device, nothing where it cannot be read: that is a fault."""
    folder = f"{store.finished_dir}/{token}"
    try:
        text = atomic.read_text(f"{folder}/{RECORD}")
        if owner.is_cut_short(text):
            return {}
        record = owner.parse_owner(text)
        if record.token != token or not is_claim_token(token):
            raise kv.MalformedError(f"it has the record of claim {record.token[:40]!r}")
        return read_released_devices(folder, record, os.lstat(folder).st_ctime)
    except FileNotFoundError:
        return {}
    except (OSError, kv.MalformedError) as fault:
        faults.add(f"{folder} cannot be read: {fault}; remove it")
        return {}


def read_released_devices(
    folder: str, record: Owner, changed: float = 0.0
) -> dict[str, ClaimedDevice]:
    """Return when and how each device of a claim was released, by its lines in `folder`.

    Raises OSError: a record that shrank does not name them all.
    Of a claim that stands those are left out that it still has. With `changed`, when a finished
    claim was moved (epoch), a device without a line was released then.
    """
    found: dict[str, ClaimedDevice] = {}
    try:
        lines = atomic.read_text(f"{folder}/{RELEASED}", RELEASED_LIMIT).split("\n")
    except FileNotFoundError:
        lines = []
    for line in lines:
        words = line.split(" ", 5)
        try:
            name, minor, uuid = words[0], *["" if word == "-" else word for word in words[3:5]]
            own = record.copy(minor=minor, uuid=uuid, draining=0)
            at = parse_sample_real(words[1])
            boottime = None if words[2] == "-" else parse_sample_real(words[2])
            found[name] = make_ended_device(name, own, at, boottime, words[5])
        except (ValueError, IndexError):
            continue  # it was cut short
    if not changed:
        return {name: part for name, part in found.items() if name not in record.devices}
    for name in record.devices:
        if name not in found:
            own = record.of_device(name, draining=False)
            found[name] = make_ended_device(name, own, changed, None, "")
    return found


def make_ended_device(
    name: str, own: Owner, at: float, boottime: float | None, how: str
) -> ClaimedDevice:
    """Return what is known of a device whose release ended at `at`; see correct_reboot_ends."""
    if boottime is None:
        held = min(at - own.claimed_at, clock_boottime() - own.claimed_boottime)
    else:
        held = boottime - own.claimed_boottime
    return ClaimedDevice(name, own, at, how, held if held >= 0 else None, boottime is not None)


def touch_last_seen(state_dir: str, standing: Iterable[Owner], wall: float, now: float) -> None:
    """Note that claims stand now; one without a record, or on a full disk, goes unnoted.

    `wall` is the epoch, `now` CLOCK_BOOTTIME. The time of a claim is held against that of the
    file: where the clock was set since the claim, the former is corrected as well.
    """
    for record in standing:
        if not is_claim_token(record.token):
            continue
        path = f"{state_dir}/{FOLDER}/{record.token}"
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
        record, seen = read_pending_record(f"{node.settings.state_dir}/{FOLDER}", token)
    except (OSError, kv.MalformedError):
        record, seen = None, now
    least = least_held_seconds(record, seen) if record else None
    how = REBOOT_PROOF if record else REBOOT
    return {
        device: part
        if part.noted or part.owner.boot_id == node.boot_id
        else part._replace(
            at=clamp_claim_end(part.owner, seen, now), held=least, how=part.how or how
        )
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
    folder = f"{node.settings.state_dir}/{FOLDER}"
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
        elif not is_claim_known(node.store, record.token):
            found[name] = lost_claim_devices(record, seen, now, node.boot_id)
    # records that are lost this moment may be of claims that stand
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


def is_claim_known(store: LockStore, token: str) -> bool:
    """Return whether there is a record of a claim, be it finished.

    A record moves from `claims/` to `finished/`, never back: looked for in this order, it is not
    missed.
    """
    return any(os.path.lexists(f"{top}/{token}") for top in (store.claims_dir, store.finished_dir))


def lost_claim_devices(
    record: Owner, seen: float, now: float, boot_id: str
) -> dict[str, ClaimedDevice]:
    """Return what is known of each device of a claim that was last seen at `seen` (epoch)."""
    how = REBOOT_PROOF if record.boot_id != boot_id else ""
    part = ClaimedDevice(
        "", record, clamp_claim_end(record, seen, now), how, least_held_seconds(record, seen)
    )
    return {
        name: part._replace(device=name, owner=record.of_device(name, draining=False))
        for name in record.devices
    }


def remove_written_claims(node: Node, tokens: Iterable[str]) -> None:
    """Remove what is left of claims whose line is written; what stays is not written again."""
    for token in tokens:
        remove_finished_claim(node.store, token, set())
        atomic.remove_quietly(f"{node.settings.state_dir}/{FOLDER}/{token}")


def remove_finished_claim(store: LockStore, token: str, faults: set[str]) -> None:
    """Remove a finished claim; its record last, so that one cut short is still known."""
    folder = f"{store.finished_dir}/{token}"
    try:
        atomic.remove_quietly(f"{folder}/{RELEASED}")
        atomic.remove_folder(folder)
    except FileNotFoundError:
        return
    except OSError as fault:
        faults.add(f"{folder} cannot be removed: {fault.strerror}")
