# SPDX-License-Identifier: Apache-2.0
"""Whether what the policy took out may come back: one check of one device. Pure.

Only a note of the policy's own is judged; an administrator's stays until `gpulock restore`. What
the exporter says lifts nothing but what it brought about, and never alone where the card itself
failed: root must have seen that it began anew (a boot, a driver or a card that was loaded again).
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping
from typing import Final, NamedTuple

from gpulock.daemon.health.findings import CAUSES, ECC, HEALTH, LOST, MEMORY, MISSING, XID
from gpulock.node import sample
from gpulock.store import kv
from gpulock.store.quarantine import POLICY

CLEAN_CHECKS: Final = 3  # in a row, before a device comes back
MAX_COMEBACKS: Final = 3  # comebacks in a day, after which a device stays out
ADMIN_RESTORE_ONLY: Final = "only an administrator brings it back"


class CardStartIds(NamedTuple):
    """What root sees of the time in which a card runs; empty where it cannot be seen.

    A note has what was seen when it was made, by these names.
    `driver` and `place` are inode numbers in sysfs, which the kernel never gives twice in a boot:
    of the driver's module, and of the card below its PCI bridge. `reset` is when gpulock reset it.
    """

    boot: str
    driver: str
    place: str
    reset: str = ""


def read_card_start_ids(boot_id: str, sys_root: str, bus: str, reset: float = 0.0) -> CardStartIds:
    """Return the facts of one card; `reset` is when gpulock reset it last in this boot."""
    driver = read_inode(f"{sys_root}/module/nvidia")
    place = read_inode(f"{sys_root}/bus/pci/devices/{bus}")
    return CardStartIds(boot_id, driver, place, f"{reset:.3f}" if reset else "")


def find_test_start(note: Mapping[str, str], reset: float, now: float) -> float:
    """Return since when a test of a card that is out counts: since its note, and its last reset."""
    out = now - max(0.0, time.time() - kv.int_or_zero(note.get("at", "")))
    return max(out, reset)


def read_inode(path: str) -> str:
    """Return the number of a folder, empty where there is none."""
    try:
        return str(os.stat(path).st_ino)
    except OSError:
        return ""


def was_card_restarted(note: Mapping[str, str], now: CardStartIds) -> bool:
    """Return whether the card was started again since a note was made."""
    if not note.get("boot"):
        return False
    if note["boot"] != now.boot or (now.reset and now.reset != note.get("reset")):
        return True
    pairs = [(note.get(name), getattr(now, name)) for name in ("driver", "place")]
    return any(before and after and before != after for before, after in pairs)


def is_policy_note(note: Mapping[str, str]) -> bool:
    """Return whether the policy, and not an administrator, made a note."""
    return note.get("by") == POLICY and bool(parse_note_causes(note))


def parse_note_causes(note: Mapping[str, str]) -> tuple[str, ...]:
    """Return why the policy took a device out, nothing where a cause is not known."""
    reasons = note.get("reason", "").split("; ")
    words = [reason.partition(":")[0] for reason in reasons if ":" in reason]
    known = tuple(dict.fromkeys([word for word in words if word in CAUSES]))
    return known if len(words) == len([word for word in words if word in CAUSES]) else ()


class DeviceObservation(NamedTuple):
    """What is to be seen of a device now: `shown` by the driver, `seen` in a fresh sample.

    `memory` is why too much of its memory is in use, nothing where it is given back, None where
    that is not known; `bad` is whether anything speaks against the device now.
    """

    shown: bool
    seen: sample.DeviceSample | None
    memory: str | None
    bad: bool
    now: CardStartIds


def check_device_recovered(note: Mapping[str, str], sight: DeviceObservation) -> bool | None:
    """Return whether a device is clean, None where that cannot be told, or not by us."""
    if ADMIN_RESTORE_ONLY in note.get("reason", ""):
        return None
    if not sight.shown or sight.bad:
        return False
    if sight.seen is not None and (sight.seen.recovery_action or sight.seen.remap_failure):
        return False
    found = [is_cause_cleared(cause, note, sight) for cause in parse_note_causes(note)]
    if False in found:
        return False
    return None if None in found or not found else True


def is_cause_cleared(cause: str, note: Mapping[str, str], sight: DeviceObservation) -> bool | None:
    """Return whether one cause is over, None where that cannot be told."""
    if cause in (MISSING, HEALTH):
        return True
    if cause == LOST:
        return True if sight.seen is not None else None
    if cause == MEMORY:
        return None if sight.memory is None else not sight.memory
    return True if sight.seen is not None and was_card_restarted(note, sight.now) else None


def describe_recovery(reason: str) -> str:
    """Return what brings a device back that the policy took out for this reason."""
    found: Collection[str] = parse_note_causes({"reason": reason})
    if ADMIN_RESTORE_ONLY in reason or not found:
        return "an administrator"
    clean = f"{CLEAN_CHECKS} clean checks by gpulockd in a row (and HEALTH_COMMAND where set)"
    if XID in found or ECC in found:
        again = "gpulock reset, a reboot or a reload of the driver"
        return f"{again}, then {clean}; or an administrator"
    return f"{clean}, or an administrator"
