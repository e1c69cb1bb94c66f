# SPDX-License-Identifier: Apache-2.0
"""What would free a device, and the next command; pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from gpulock.alloc import states
from gpulock.alloc.states import DeviceState
from gpulock.store.owner import Owner
from gpulock.store.quarantine import POLICY
from gpulock.text.words import FORCE

PROCESS_IN_PROOF = re.compile(
    r"\bprocess ([0-9]+)\b"
)  # in the proof of a verdict: the one that runs

ADMINISTRATOR = "an administrator"  # only an administrator restores what an administrator took out
SIMPLE = {
    states.STALE: ("the next claim that needs it, or a reap", "gpulock reap"),
    states.FREE: ("nothing: it is free", "gpulock run -n 1 --wait -- COMMAND"),
}
NEEDS_INSTANCE = ("a MIG instance that the exporter tells, or MIG mode off", "nvidia-smi mig -lgi")
# of one that is stale, and waits for the exporter's word


def advise_device_release(
    row: DeviceState, proof: str = "", stray: str = "", pids: Sequence[int] = ()
) -> tuple[str, str]:
    """Return (what frees it, next command); `proof` is the verdict's, where there is one.

    `stray` is the path of what stands in the place of a lock's folder, `pids` are processes that
    have a device open and ought not to.
    """
    name = row.device.label() if row.device else row.id
    record = row.lock.owner if row.lock else None
    if row.state == states.MISSING:
        return advise_missing_card(row, name)
    if stray:
        return "its removal: it is not a directory, so it is no lock", f"rm {shlex.quote(stray)}"
    if row.state == states.FOREIGN or row.orphans:
        return advise_open_device(row, name, pids)
    if row.state == states.QUARANTINED:
        back = quarantine_end_condition(row.reason), restore_hint(row)
        return NEEDS_INSTANCE if row.lacks_instance() else back
    if row.state in SIMPLE:
        return SIMPLE[row.state]
    if record is None or (row.lock and row.lock.fault):
        return advise_without_owner(row, name)
    if row.state == states.NOT_KNOWN:
        return "a reap that can prove its end", f"gpulock reap, or {FORCE.format(name)}"
    return advise_held_device(record, name, proof)


def is_closed_by_mps(row: DeviceState) -> bool:
    """Return whether nobody holds a device, and its MPS keeps it from being free."""
    return row.state == states.HELD and row.lock is None and not row.reserved


def advise_open_device(row: DeviceState, name: str, pids: Sequence[int]) -> tuple[str, str]:
    """Return the advice for a device that somebody has open who ought not to."""
    if row.lock is not None:
        return "a reap, once no process has it open", f"{end_process_hint(pids)}, then gpulock reap"
    out = f'gpulock quarantine {name} --reason "TEXT"'
    return "the end of the process that has it open", f"{end_process_hint(pids)}, or {out}"


def advise_without_owner(row: DeviceState, name: str) -> tuple[str, str]:
    """Return the advice for a device without an owner that can be read."""
    if row.reserved:
        return "its user, or the end of that time", "gpulock run -n 1 --wait -- COMMAND"
    if is_closed_by_mps(row):
        return "the end of that MPS, by gpulockd", "gpulock doctor"
    if row.lock and row.lock.fault:
        return "an administrator: no reap frees what it cannot read", FORCE.format(name)
    return "a reap, where no claim is at work", "gpulock reap"


def end_process_hint(pids: Sequence[int]) -> str:
    """Return how to end the processes that have a device open: the first by pid."""
    return f"end process {pids[0]} (ps -fp {pids[0]} shows it)" if pids else "end that process"


def restore_hint(row: DeviceState) -> str:
    """Return what puts a device back into service: an instance may be out by its card."""
    assert row.device is not None
    if row.noted in ("", row.id):
        return f"gpulock restore {row.device.label()}"
    return f"gpulock restore {row.device.index if row.noted == row.device.bus else row.noted}"


def quarantine_end_condition(reason: str) -> str:
    """Return what brings a device back; the reason ends with who took it out."""
    why, _, who = reason.rpartition(" (")
    if who != f"{POLICY})":
        return ADMINISTRATOR
    from gpulock.daemon.health.recovery import describe_recovery  # its modules cost 10 ms

    return describe_recovery(why)


def advise_missing_card(row: DeviceState, name: str) -> tuple[str, str]:
    """Return the advice for a card that is not there."""
    if row.device is not None:
        return "a driver that can read the card again", "look at dmesg for NVRM and Xid"
    if row.lock is not None:
        return "the end of its job", f"gpulock reap, or {FORCE.format(name)}"
    return "the card, back on the bus", "look at dmesg for NVRM and Xid"


def advise_held_device(record: Owner, name: str, proof: str) -> tuple[str, str]:
    """Return the advice for a device whose owner lives."""
    if record.scheduler == "admin":
        return "an administrator", f"gpulock unreserve {name}"
    if record.scheduler == "process":
        found = PROCESS_IN_PROOF.search(proof)
        pid = found[1] if found else record.pid
        return "the end of that process", f"look at it: ps -fp {pid}"
    if record.draining or "without a shepherd" in proof:
        return "the next claim or reap after its last process has ended", "gpulock reap"
    if record.scheduler == "slurm":
        return "its epilog, when the job ends", f"scontrol show job {record.job_id}"
    if record.scheduler == "sge":
        return "its epilog, when the job ends", f"qstat -j {record.job_id}"
    return "the end of the job", f"gpulock why {record.job()}"
