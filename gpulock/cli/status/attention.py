# SPDX-License-Identifier: Apache-2.0
"""What somebody must look at, below the table of `gpulock status`, with the next command. Pure."""

from __future__ import annotations

from gpulock.alloc import states
from gpulock.alloc.memory_check import FIRST
from gpulock.alloc.states import Row
from gpulock.cli.status.device_use import foreign
from gpulock.cli.status.node_view import View, stray
from gpulock.text import table
from gpulock.text.advice import ADMINISTRATOR, of_quarantine, restoring
from gpulock.text.words import FORCE, counted, device_name, holder

ATTENTION = (states.MISSING, states.QUARANTINED, states.STALE, states.NOT_KNOWN, states.FOREIGN)
IN_USE = (states.HELD, states.HELD_IDLE)


def attention(view: View, rows: list[Row], width: int) -> list[str]:
    """Return a line for each such thing, devices of one fate on one line."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row.state in ATTENTION:
            fate = f"{row.state} {row.reason} {strangers(view, row)} {claim_of(row)}"
            groups.setdefault(fate, []).append(row)
    pairs = [(label(same), sentence(view, same[0])) for same in groups.values()]
    pairs += [(label([row]), beside(view, row)) for row in rows if crowded(view, row)]
    if view.lost:
        why = "nothing is granted until they are put back; run gpulock reap as root"
        pairs.insert(0, ("locks lost", why))
    if view.use.why:
        pairs.append(("samples", view.use.why))
    return table.facts(pairs, width)


def claim_of(row: Row) -> str:
    """Return what tells the lock of a row from others, nothing where it has none."""
    if row.lock is None:
        return ""
    return row.lock.owner.token if row.lock.owner else row.id


def label(rows: list[Row]) -> str:
    """Return what names rows in a line of their own."""
    names = [device_name(row.device) if row.device else row.id for row in rows]
    if rows[0].device is None:
        return rows[0].id if rows[0].lock else counted(len(rows), "GPU")
    return f"GPU{'s' if len(rows) > 1 else ''} {', '.join(names)}"


def sentence(view: View, row: Row) -> str:
    """Return state, reason and the next command."""
    who = strangers(view, row) if row.state == states.FOREIGN else ""
    reason = f"free, but in use by {who}" if who else row.reason
    if stray(view.node, row.lock):
        return f"{row.state}: {reason}; gpulock why {label([row]).removeprefix('GPU ')}"
    return f"{row.state}: {reason}; {next_command(row)}"


def crowded(view: View, row: Row) -> bool:
    """Return whether somebody else's processes are on a device that is held."""
    return row.state in IN_USE and bool(foreign(view.use.seen(row.id)))


def beside(view: View, row: Row) -> str:
    """Return who is on a device that another one holds."""
    record = row.lock.owner if row.lock else None
    whose = f" of {holder(record)}" if record else ""
    return f"foreign: in use by {strangers(view, row)}, not{whose}; {next_command(row)}"


def strangers(view: View, row: Row) -> str:
    """Return the foreign processes on a device as far as they were seen: `process 4711`."""
    seen = view.use.seen(row.id)
    count = foreign(seen)
    if seen is None or not count:
        return ""
    if len(seen.foreign_pids) < count:
        named = f", such as {seen.foreign_pids[0]}" if seen.foreign_pids else ""
        return f"{counted(count, 'process')}{named}"
    return f"process{'es' if count > 1 else ''} {', '.join(map(str, seen.foreign_pids))}"


def next_command(row: Row) -> str:
    """Return what to do about a row that needs attention."""
    name = device_name(row.device) if row.device else row.id
    if row.state == states.STALE and not row.reason.endswith(FIRST):
        return "the next claim or gpulock reap frees it"
    if row.state == states.MISSING:
        return f"gpulock why {name}" if row.lock else "look at dmesg for the card"
    if row.state == states.NOT_KNOWN and row.lock and row.lock.fault:
        return f"no reap frees it, but {FORCE.format(name)}"
    if row.state == states.QUARANTINED and not (row.lock and row.lock.orphans):
        if of_quarantine(row.reason) == ADMINISTRATOR:
            return f"{restoring(row)} ends it"
        return f"gpulockd brings it back when it is clean, or {restoring(row)}"
    return f"gpulock why {name}"
