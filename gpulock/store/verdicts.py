# SPDX-License-Identifier: Apache-2.0
"""LOCK_DIR/verdicts: what the last reconcile found out about each claim, for everybody to read.

Hot. Written by a reconcile alone (gpulockd, or `gpulock reap` as root), under the gate. A reader
takes nothing older than three periods: then a verdict is not known, which is neither dead nor
alive.
"""

from gpulock.deadline import clock_boottime
from gpulock.errors import one_line
from gpulock.store import atomic, kv

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal

    State = Literal["alive", "dead", "unknown", "not judged"]
    DeathProof = Literal["reboot", "released", "process", "shepherd", "steps", "slurmctld", "other"]

ALIVE: "State" = "alive"
DEAD: "State" = "dead"
UNKNOWN: "State" = "unknown"
NOT_JUDGED: "State" = "not judged"  # the caller knows that the claim is over
STATES: "dict[str, State]" = {ALIVE: ALIVE, DEAD: DEAD}  # that a reconcile is sure of
# What proved that an owner is dead: a label of the metric gpulock_locks_reaped_total.
REBOOT: "DeathProof" = "reboot"
RELEASED: "DeathProof" = "released"
PROCESS: "DeathProof" = "process"
SHEPHERD: "DeathProof" = "shepherd"
STEPS: "DeathProof" = "steps"
SLURMCTLD: "DeathProof" = "slurmctld"
OTHER: "DeathProof" = "other"
VERSION_LINE = "gpulock-verdicts 1"
ORPHANS = " orphans"  # ends the key, behind a token, of what has a device of that claim open
LIMIT = 1 << 20  # bytes
PERIOD = 30.0  # seconds between reconciles of gpulockd
FRESH = 3 * PERIOD
ROUNDING = 0.001  # seconds: what is written as milliseconds may be rounded up


class Verdict:
    """`state` with its `proof`, one clause for people; `by` is what proved a death.

    `orphans` says which process has a device of a dead owner open.
    """

    def __init__(self, state: "State", proof: str, by: "DeathProof" = OTHER) -> None:
        self.state = state
        self.proof = proof
        self.by = by
        self.orphans = ""


def process_in_proof(text: str) -> int:
    """Return the process that a proof or reason names first, 0 for none."""
    number = text.partition("process ")[2].partition(" ")[0]
    return int(number) if number.isascii() and number.isdigit() else 0


def write_verdicts(lock_dir: str, verdicts: dict[str, Verdict], boot_id: str) -> None:
    """Replace the verdicts, by token; raise OSError."""
    pairs = [("boot_id", boot_id), ("checked_boottime", f"{clock_boottime():.3f}")]
    for token, verdict in sorted(verdicts.items()):
        if token.isalnum():
            pairs.append((token, f"{verdict.state} {one_line(verdict.proof)}"))
            if verdict.orphans:
                pairs.append((f"{token}{ORPHANS}", one_line(verdict.orphans)))
    data = f"{VERSION_LINE}\n{kv.encode_pairs(pairs)}"
    atomic.replace_file(f"{lock_dir}/verdicts", data.encode("utf-8", "replace"))


def read_dated_verdicts(
    lock_dir: str, now: float, boot_id: str
) -> "tuple[dict[str, Verdict] | None, float | None]":
    """Return the verdicts by token, None where none are fresh, and when they were made.

    `now` and that time are CLOCK_BOOTTIME seconds; the time is None where there are none of this
    boot: a LOCK_DIR may be kept over a reboot. Raises OSError or ValueError.
    """
    try:
        text = atomic.read_text(f"{lock_dir}/verdicts", LIMIT)
    except FileNotFoundError:
        return None, None
    pairs = kv.decode_pairs(text, VERSION_LINE)
    written_in = pairs.pop("boot_id", "")
    checked = float(pairs.pop("checked_boottime", "nan"))
    if written_in != boot_id or not 0 <= checked <= now + ROUNDING:
        return None, None
    at = min(checked, now)
    if now - at > FRESH:
        return None, at
    verdicts: dict[str, Verdict] = {}
    for token, value in pairs.items():
        if not token.endswith(ORPHANS):
            state, _, proof = value.partition(" ")
            verdicts[token] = Verdict(STATES.get(state, UNKNOWN), proof)
            verdicts[token].orphans = pairs.get(f"{token}{ORPHANS}", "")
    return verdicts, at
