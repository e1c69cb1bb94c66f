# SPDX-License-Identifier: Apache-2.0
"""What each share of a card did, as far as that is certain. Reads of processes go through `tree`.

The driver tells of the card alone. Where it was at rest, so was each claim on it; where one claim
alone is on it, all of it was that claim's work. Else the claims are not observed, which is not
idle. Memory goes to the owner of each process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpulock.alloc.process_owner import is_claim_process
from gpulock.alloc.process_scan import ProcessScan
from gpulock.node.devices import SHARE
from gpulock.store.locks import Lock
from gpulock_exporter.state.device_totals import DeviceActivity
from gpulock_exporter.state.snapshot import DeviceProcesses


def share_activity(
    locks: Mapping[str, Lock],
    looks: Mapping[str, DeviceActivity],
    present: Mapping[str, DeviceProcesses],
) -> dict[str, DeviceActivity]:
    """Return what each share did in the looks at the cards, by lock id. Pure."""
    claims: dict[str, set[str]] = {}  # by bus id; each lock whose owner cannot be read is one more
    for name, lock in locks.items():
        bus, share, _ = name.partition(SHARE)
        if share and bus in looks:
            claims.setdefault(bus, set()).add(lock.owner.token if lock.owner else name)
    found: dict[str, DeviceActivity] = {}
    for name in locks:
        bus = name.partition(SHARE)[0]
        if bus == name or bus not in claims:
            continue
        look, on = looks[bus], present.get(bus)
        busy = look.busy if look.worked else 0.0
        is_alone = len(claims[bus]) == 1 and on is not None and not (on.foreign or on.unseen)
        if look.busy is None or (look.worked and not is_alone):
            busy = None
        seen = 0.0 if busy is None else look.observed
        memory = on.share_memory.get(name) if on else None
        found[name] = DeviceActivity(look.since, look.at, busy, seen, memory=memory)
    return found


def sum_share_memory(
    listed: Mapping[int, int | None], locks: Sequence[Lock], tree: ProcessScan
) -> dict[str, int]:
    """Return the bytes in use by the processes of each share, by lock id.

    A claim of several places has all on its first. What is of no share, or may be of several, is
    nobody's. Where the driver does not tell the memory of each process, nothing is known.
    """
    first = {one.owner.token: one for one in reversed(locks) if one.owner and SHARE in one.id}
    if not first or None in listed.values():
        return {}
    found = {lock.id: 0 for lock in locks if SHARE in lock.id}
    for pid, memory in listed.items():
        try:
            of = [one for one in first.values() if is_claim_process(pid, one, tree)]
        except (OSError, ValueError):  # it has ended, or is hidden
            continue
        if len(of) == 1:
            found[of[0].id] += memory or 0
    return found
