# SPDX-License-Identifier: Apache-2.0
"""Whether what the policy took out may come back: one check of one device. Pure.

Only a note of the policy's own is judged; an administrator's stays until `gpulock restore`. What
the exporter says lifts nothing but what it brought about, and never alone where the card itself
failed: root must have seen that it began anew (a boot, or a driver that was loaded again).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

from gpulock.daemon.health.cards import NodeCards
from gpulock.daemon.health.findings import (
    CAUSES,
    ECC,
    HEALTH,
    LOST,
    XID,
    HealthFinding,
)
from gpulock.store.quarantine import POLICY

CLEAN_CHECKS: Final = 3  # in a row, before a device comes back
MAX_COMEBACKS: Final = 3  # comebacks in a day, after which a device stays out
DAY: Final = 86400.0  # seconds
MOST_REASONS: Final = 4  # in a note
ADMIN_RESTORE_ONLY: Final = "only an administrator brings it back"


def out_since(note: Mapping[str, str], boot_id: str) -> float:
    """Return when a device went out (CLOCK_BOOTTIME), 0 where that was in another boot."""
    if note.get("boot") != boot_id:
        return 0.0
    try:
        return float(note.get("since", ""))
    except ValueError:
        return float("inf")


def test_since(note: Mapping[str, str], cards: NodeCards) -> float:
    """Return since when HEALTH_COMMAND counts for a card that is out: what was before is over."""
    return max(out_since(note, cards.boot_id), cards.loaded)


def was_card_restarted(note: Mapping[str, str], cards: NodeCards) -> bool:
    """Return whether a card was started again since a note: by a boot, or with the driver.

    A note has by `boot` and `since` when the last event was that wants it.
    """
    other = note.get("boot", cards.boot_id) != cards.boot_id
    return other or ("boot" in note and cards.loaded > out_since(note, cards.boot_id))


def is_policy_note(note: Mapping[str, str]) -> bool:
    """Return whether the policy, and not an administrator, made a note."""
    return note.get("by") == POLICY and bool(parse_note_causes(note))


def parse_note_causes(note: Mapping[str, str]) -> tuple[str, ...]:
    """Return why the policy took a device out, nothing where a cause is not known."""
    reasons = note.get("reason", "").split("; ")
    words = [cause for cause, colon, _ in (one.partition(":") for one in reasons) if colon]
    return tuple(dict.fromkeys(words)) if set(words) <= {*CAUSES} else ()


def is_end_known(note: Mapping[str, str], *, sampled: bool, restarted: bool, tested: bool) -> bool:
    """Return whether enough is known of a device to call it clean, as nothing speaks against it.

    A fresh sample names it (`sampled`), its card was `restarted` since it went out, HEALTH_COMMAND
    will have `tested` it before it is back.
    """
    causes = parse_note_causes(note)
    if ADMIN_RESTORE_ONLY in note.get("reason", "") or not causes:
        return False
    again = sampled and restarted
    health = sampled or tested
    known = {LOST: sampled, XID: again, ECC: again, HEALTH: health}
    return all(known.get(cause, True) for cause in causes)


def describe_recovery(reason: str) -> str:
    """Return what brings a device back that the policy took out for this reason."""
    causes = parse_note_causes({"reason": reason})
    if ADMIN_RESTORE_ONLY in reason or not causes:
        return "an administrator"
    clean = f"{CLEAN_CHECKS} clean checks by gpulockd in a row (and HEALTH_COMMAND where set)"
    if XID in causes or ECC in causes:
        again = "a reboot or a reload of the driver"
        return f"{again}, then {clean}; or an administrator"
    return f"{clean}, or an administrator"


def merge_note_reasons(
    noted: Mapping[str, str] | None, reasons: list[HealthFinding], flaps: bool
) -> list[str]:
    """Return the reasons of a note, those that are `noted` first, none twice."""
    words = noted["reason"].split("; ") if noted else []
    words += [f"{one.cause}: {one.words.replace(';', ',')}" for one in reasons]
    words = list(dict.fromkeys(words))[:MOST_REASONS]
    if flaps and noted is None:
        cause = words[0].partition(":")[0]
        words.append(f"{cause}: {MAX_COMEBACKS} comebacks in a day, {ADMIN_RESTORE_ONLY}")
    return words


def note_comeback(cards: NodeCards, name: str) -> None:
    """Note that a device comes back now."""
    now = time.time()
    cards.backs = [*((at, one) for at, one in cards.backs if at > now - DAY), (now, name)]


def is_device_flapping(cards: NodeCards, name: str) -> bool:
    """Return whether a device came back by itself too often in the last day."""
    begun = time.time() - DAY
    return len([at for at, one in cards.backs if one == name and at > begun]) >= MAX_COMEBACKS
