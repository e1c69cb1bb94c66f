# SPDX-License-Identifier: Apache-2.0
"""STATE_DIR/owed: claims whose end LOCK_DIR does not tell any more, for the history.

Warm. A record is made with its claim (gpulock.runs) and goes when the claim's line is written.
As long as LOCK_DIR knows a claim, as a lock or as a released one, its record only waits. Where
the node went down, or LOCK_DIR was lost, the record is all that is left: its claim is over, and
was held at least until it was last seen, which is when the file was last touched.
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterable

from gpulock import atomic, kv, owner
from gpulock.daemon.history_record import Part
from gpulock.locks import Store
from gpulock.node import Node
from gpulock.owner import Owner
from gpulock.runs import OWED
from gpulock.sample import is_token

EMPTY_SECONDS = 60.0  # whoever makes a record has written it by then
BOOTED = "reap: claimed before this boot; it was last seen at the end that is told"


def see(state_dir: str, tokens: Iterable[str]) -> None:
    """Note that claims stand now; one without a record, or on a full disk, goes unnoted."""
    for token in tokens:
        if is_token(token):
            try:
                os.utime(f"{state_dir}/{OWED}/{token}", follow_symlinks=False)
            except OSError:
                continue


def settle(state_dir: str, token: str) -> None:
    """Remove the record of a claim whose line is written."""
    atomic.remove_quietly(f"{state_dir}/{OWED}/{token}")


def lost(
    node: Node, known: Container[str], faults: set[str], now: float
) -> dict[str, dict[str, Part]]:
    """Return the claims of which nothing but the record is left, by token and device.

    `known` are tokens that LOCK_DIR was just seen to have; `now` is the epoch. What cannot be
    read is a fault, and stays.
    """
    folder = f"{node.settings.state_dir}/{OWED}"
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        return {}
    found: dict[str, dict[str, Part]] = {}
    for name in names:
        if name in known:
            continue
        try:
            record, seen = read(folder, name)
        except FileNotFoundError:
            continue
        except (OSError, kv.MalformedError) as fault:
            faults.add(f"{folder}/{name} cannot be read: {fault}; remove it")
            continue
        if record is None:
            if now - seen > EMPTY_SECONDS:
                settle(node.settings.state_dir, name)
        elif not is_known(node.store, record):
            found[name] = parts_of(record, min(seen, now), node.boot_id)
    # a LOCK_DIR that is lost this moment has not been filled again yet
    return found if node.store.boot_id() == node.boot_id else {}


def read(folder: str, name: str) -> tuple[Owner | None, float]:
    """Return a record and when its claim was last seen (epoch); raise OSError or MalformedError.

    None for an empty one: of a write that is at work, or was cut short by a kill or a power cut.
    """
    path = f"{folder}/{name}"
    info = os.lstat(path)
    if info.st_uid != os.geteuid():
        raise PermissionError(f"it belongs to uid {info.st_uid}, not to uid {os.geteuid()}")
    text = atomic.read_text(path)
    if not text:
        return None, info.st_mtime
    record = owner.parse(text)
    if record.token != name or not is_token(name) or not record.devices:
        raise kv.MalformedError(f"it has the record of claim {record.token[:40]!r}")
    return record, info.st_mtime


def is_known(store: Store, record: Owner) -> bool:
    """Return whether LOCK_DIR still tells of a claim.

    A lock moves from `locks/` to `released/`, never back: looked for in this order, it is not
    missed. Its record is made after the first of its locks.
    """
    for device in record.devices:
        lock = store.read(device)
        if lock.fault or (lock.owner and lock.owner.token == record.token):
            return True
    return any(
        os.path.lexists(f"{store.released_dir}/{record.token}.{device}")
        for device in record.devices
    )


def parts_of(record: Owner, seen: float, boot_id: str) -> dict[str, Part]:
    """Return what is known of each device of a claim that was last seen at `seen` (epoch)."""
    how = BOOTED if record.boot_id != boot_id else ""
    at = max(seen, record.claimed_at)
    return {device: Part(device, record, at, None, how) for device in record.devices}
