# SPDX-License-Identifier: Apache-2.0
"""Claims that are over and have no line in the history yet: what their records tell.

Warm. A claim that is over waits in `finished/`. Its copy in STATE_DIR/owed is made with it,
and goes when its line is written. As long as there is a record of the claim the copy only waits.
Where the node went down, or the records were lost, the copy is all that is left: its claim is over,
and was held at least until it was last seen, which is when the file was last touched.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from contextlib import suppress

from gpulock.daemon.core.sample import is_claim_token, parse_sample_real
from gpulock.daemon.history.record import ClaimedDevice
from gpulock.deadline import clock_boottime
from gpulock.node.context import Node
from gpulock.store import atomic, kv, owner
from gpulock.store.grants import OWED
from gpulock.store.locks import RECORD, RELEASED, LockStore, list_names
from gpulock.store.owner import Owner

MIN_SEEN_SECONDS = 5.0  # within them a record is written; one seen no later was never seen
RELEASED_LIMIT = 1 << 18  # bytes: a line for each of 128 instances
EMPTY_SECONDS = 60.0  # the process that makes a record has written it by then
REBOOT = "reap: claimed before this boot"
REBOOT_PROOF = f"{REBOOT}; its end is when it was last seen"

EndedClaims = dict[str, list[ClaimedDevice]]  # by token


def find_ended_claims(
    node: Node, standing: Collection[str], faults: set[str], now: float
) -> EndedClaims:
    """Return the claims that are over by token; what cannot be read is a fault, and stays.

    `standing` are the claims that a reconcile just saw to stand, `now` is the epoch. What a kill or
    a power cut left of a record is removed. Raises Refusal where a folder cannot be read.
    """
    finished = {*list_names(node.store.finished_dir)}
    copies = f"{node.settings.state_dir}/{OWED}"
    ended: EndedClaims = {}
    for token in sorted(finished | {*list_names(copies)} - {*standing}):
        path = f"{node.store.finished_dir if token in finished else copies}/{token}"
        try:
            parts = read_ended_claim(node, token, now)
        except (OSError, kv.MalformedError) as fault:
            faults.add(f"{path} cannot be read: {fault}; remove it")
            continue
        if parts and parts[0].owner.is_health_check():
            remove_finished_claim(node.store, token, faults)  # nobody's use
        elif token in finished:
            if parts:
                ended[token] = parts
            else:  # its removal was cut short, or the power while it was written
                remove_finished_claim(node.store, token, faults)
        elif not parts:
            with suppress(OSError):  # it was cut short, and nobody can be writing it any more
                if now - os.lstat(path).st_mtime > EMPTY_SECONDS:
                    os.unlink(path)
        elif (
            # a record moves from `claims` to `finished`, never back: in this order none is missed
            not os.path.lexists(f"{node.store.claims_dir}/{token}")
            and not os.path.lexists(f"{node.store.finished_dir}/{token}")
            and node.store.boot_id() == node.boot_id  # else it may be one that stands
        ):
            ended[token] = parts
    return ended


def read_ended_claim(node: Node, token: str, now: float) -> list[ClaimedDevice]:
    """Return the devices of a claim that is over, none where its records were cut short.

    `now` is the epoch. Raises OSError or kv.MalformedError. A claim that a reboot ended was freed
    in another boot: by a clock that says nothing of its own, after a time in which the node may
    have been off. It ends when it was last seen.
    """
    folder = f"{node.store.finished_dir}/{token}"
    own = read_record(f"{folder}/{RECORD}", token)
    if own and own.boot_id == node.boot_id:
        how, at = "", os.lstat(folder).st_ctime
        seconds = min(at - own.claimed_at, clock_boottime() - own.claimed_boottime)
        held = seconds if seconds >= 0 else None
    else:
        copy, seen, path = None, now, f"{node.settings.state_dir}/{OWED}/{token}"
        try:
            seen, copy = os.lstat(path).st_mtime, read_record(path, token)
        except (OSError, kv.MalformedError) as fault:
            if own is None and not isinstance(fault, FileNotFoundError):
                raise
        own = own or copy
        if own is None:
            return []
        seconds = seen - copy.claimed_at if copy else 0.0
        held = (
            seconds if seconds > MIN_SEEN_SECONDS else None
        )  # else nobody saw it again, or a clock was set
        at = min(max(seen, own.claimed_at), now)  # a file's time is the kernel's coarse clock
        how = (REBOOT_PROOF if copy else REBOOT) if own.boot_id != node.boot_id else ""
    rest = {name: ClaimedDevice(name, own, at, how, held) for name in own.devices}
    return list({**rest, **read_released_devices(folder, own)}.values())


def read_record(path: str, token: str) -> Owner | None:
    """Return the record of a claim, None where it is missing or was cut short.

    Raises OSError or kv.MalformedError.
    """
    try:
        text = atomic.read_text(path)
    except FileNotFoundError:
        return None
    if owner.is_cut_short(text):
        return None
    record = owner.parse_owner(text)
    if record.token != token or not is_claim_token(token):
        raise kv.MalformedError(f"it has the record of claim {record.token[:40]!r}")
    return record


def read_released_devices(folder: str, record: Owner) -> dict[str, ClaimedDevice]:
    """Return when and how devices of a claim were released, by the lines in `folder`.

    A record that shrank does not name them all. Raises OSError.
    """
    released: dict[str, ClaimedDevice] = {}
    try:
        lines = atomic.read_text(f"{folder}/{RELEASED}", RELEASED_LIMIT).split("\n")
    except FileNotFoundError:
        return released
    for line in lines:
        words = line.split(" ", 5)
        try:
            name, minor, uuid = words[0], *["" if word == "-" else word for word in words[3:5]]
            own = record.copy(devices=(name,), minors=(minor,), uuids=(uuid,))
            held = parse_sample_real(words[2]) - own.claimed_boottime
            seconds = held if held >= 0 else None
            at = parse_sample_real(words[1])
            released[name] = ClaimedDevice(name, own, at, words[5], seconds)
        except (ValueError, IndexError):
            continue  # it was cut short
    return released


def touch_last_seen(state_dir: str, standing: Iterable[Owner], now: float) -> None:
    """Note that claims stand now (CLOCK_BOOTTIME), as far as they have a copy.

    The time of the file is the claim's own, plus what went by since on the clock of this boot: it
    is right to the record also where the clock of the day was set meanwhile.
    """
    for record in standing:
        if is_claim_token(record.token):
            at = record.claimed_at + now - record.claimed_boottime
            with suppress(OSError, ValueError, OverflowError):
                path = f"{state_dir}/{OWED}/{record.token}"
                os.utime(path, (at, at), follow_symlinks=False)


def remove_written_claims(node: Node, tokens: Iterable[str]) -> None:
    """Remove what is left of claims whose line is written; what stays is not written again."""
    for token in tokens:
        remove_finished_claim(node.store, token, set())
        atomic.remove_quietly(f"{node.settings.state_dir}/{OWED}/{token}")


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
