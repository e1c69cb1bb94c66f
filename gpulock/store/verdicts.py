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
PERIOD = 30.0  # seconds between reconciles of gpulockd
FRESH = 3 * PERIOD
ROUNDING = 0.001  # seconds: what is written as milliseconds may be rounded up


class Verdict:
    """`state` with its `proof`, one clause for people; `by` is what proved a death."""

    __slots__ = ("by", "proof", "state")

    def __init__(self, state: "State", proof: str, by: "DeathProof" = OTHER) -> None:
        self.state = state
        self.proof = proof
        self.by = by


def write_verdicts(lock_dir: str, found: dict[str, Verdict], boot_id: str) -> None:
    """Replace the verdicts, by token; raise OSError."""
    pairs = [("boot_id", boot_id), ("checked_boottime", f"{clock_boottime():.3f}")]
    pairs += [
        (token, f"{v.state} {one_line(v.proof)}")
        for token, v in sorted(found.items())
        if token.isalnum()
    ]
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
        text = atomic.read_text(f"{lock_dir}/verdicts", 1 << 20)
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
    words = [(token, *value.partition(" ")[::2]) for token, value in pairs.items()]
    return {token: Verdict(STATES.get(state, UNKNOWN), proof) for token, state, proof in words}, at
