# SPDX-License-Identifier: Apache-2.0
"""Claims that a process holds: `gpulock run` and `gpulock claim`, where there is no scheduler.

The process's pid and start time are the owner. Where it leads a session of its own, the whole
session keeps the claim; of a command started from a terminal, whose session is the login's,
itself, what was started with its GPULOCK_CLAIM, and the processes that have its devices open.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from gpulock.alloc.choose import LAST, LATE, ClaimRequest
from gpulock.alloc.claim import Grant, claim_devices
from gpulock.alloc.device_users import OpenFiles
from gpulock.alloc.liveness import Judge
from gpulock.alloc.process_scan import ProcessScan
from gpulock.deadline import Deadline, clock_boottime
from gpulock.errors import BROKEN, INVALID_REQUEST, Refusal, one_line
from gpulock.node.context import Node
from gpulock.node.devices import SHARE, lock_ids_overlap
from gpulock.node.kinds import is_of_kind
from gpulock.schedulers.liveness import make_liveness_judge
from gpulock.store import boot, grants
from gpulock.store.gate import LONGEST_WAIT, Gate
from gpulock.store.locks import Lock, list_names
from gpulock.store.owner import NO_CLUSTER, Owner
from gpulock.store.reservations import find_reserved_devices, read_reservations
from gpulock.workstation.wire import FOR_EVER, SocketRequest


def make_process_owner(node: Node, pid: int, user: str, comment: str = "") -> Owner:
    """Return the record of a claim held by process `pid`; raise Refusal when it is not there."""
    try:
        stat = node.proc.stat(pid)
        uid = node.proc.status(pid).uids[0]
    except (FileNotFoundError, ProcessLookupError):
        raise Refusal(INVALID_REQUEST, f"no such process: {pid}", "name one that runs") from None
    except (OSError, ValueError) as fault:
        raise Refusal(BROKEN, f"process {pid} cannot be seen: {fault}", "is it alive?") from fault
    return Owner(
        scheduler="process",
        cluster=NO_CLUSTER,
        node=node.name,
        job_id=str(pid),
        pid=pid,
        start=stat.start,
        sid=pid if stat.session == pid else 0,
        user=one_line(user),
        uid=uid,
        boot_id=node.boot_id,
        namespaces=node.proc.namespaces(""),
        comment=one_line(comment),
    )


def refuse_other_claim(node: Node, record: Owner, want: ClaimRequest, mine: list[Lock]) -> None:
    """Raise Refusal where the process of `record` has another claim than this: it may have one.

    The gate is held.
    """
    for lock in mine:
        other = lock.owner
        if other is None or (other.run(), other.boot_id) != (record.run(), record.boot_id):
            continue  # of an earlier process of this number
        cards = {name.partition(SHARE)[0] for name in other.devices}
        devices = [device for device in node.known_devices() if device.id in cards]
        same = len(other.devices) == want.count and want.share == (SHARE in lock.id)
        if want.wanted:
            same = same and {*want.wanted} == cards
        elif not want.share:
            kinds = dict(want.kinds or ((node.settings.plain_request, 0),))
            same = same and all(any(is_of_kind(one, kind) for kind in kinds) for one in devices)
        if not same:
            labels = ", ".join([device.label() for device in devices])
            why = f"pid {record.pid} holds GPU {labels} already"
            raise Refusal(INVALID_REQUEST, why, f"gpulock release --pid {record.pid} first")


def ensure_node_dirs(node: Node) -> None:
    """Make the folders of claims where they are missing and may be made; raise Refusal."""
    node.store.check(make=True)
    with Gate(node.store, Deadline(LONGEST_WAIT)):
        boot.prepare_boot(node.store, node.settings.state_dir, node.boot_id, node.name)


LONGEST_CLAIM = 1e9  # seconds: everybody's `status` tells its end as a date
ANY_REQUEST = SocketRequest()
LOOK_SECONDS = 0.3  # for a preference


def prefer_unused_cards(node: Node, want: ClaimRequest, pid: int) -> None:
    """Let a claim for process `pid` take the devices last that any other process has open.

    Somebody may work without asking. That costs a pass over all open files, which a command may
    take and a scheduler's hook may not; what it has found after LOOK_SECONDS is enough. Where the
    request leaves no choice, nothing is read. Files that cannot be read refuse nobody.
    """
    want.last = {}  # a caller who waits asks again with the same request
    taken = list_names(node.store.locks_dir)
    free = [
        device
        for device in node.devices()
        if not (device.fault or device.withheld)
        and not any(lock_ids_overlap(device.id, name) for name in taken)
    ]
    if not 0 < want.count < len(free):
        return
    try:
        files = OpenFiles(ProcessScan(node.proc), free, node.settings)
        files.seconds = LOOK_SECONDS
        used = [device.id for device in free if set(files.pids_with_open(device.id)) - {pid}]
    except OSError:
        return
    want.last = dict.fromkeys(used, LATE)


def claim_for_process(
    node: Node,
    record: Owner,
    want: ClaimRequest,
    deadline: Deadline,
    request: SocketRequest = ANY_REQUEST,
    judge: Callable[[Node], Judge] = make_liveness_judge,
) -> Grant:
    """Claim for a process, which has one claim at a time; raise Refusal.

    `request` tells of its end, its note and what is preferred; what is reserved for somebody else
    before that end is taken last. `judge` makes the judge of those whose devices it may take.
    """
    if not (want.wanted or want.share):
        prefer_unused_cards(node, want, record.pid)
    if request.preferred:
        others = [one.id for one in node.devices() if one.id not in request.preferred]
        want.last.update(dict.fromkeys(others, LATE))
    longest, now = node.settings.claim_max, time.time()
    end = now + (request.seconds or longest or FOR_EVER)
    every = read_reservations(node.settings.state_dir)
    want.last.update(dict.fromkeys(find_reserved_devices(every, now, record.uid, end), LAST))
    if request.seconds > (longest or LONGEST_CLAIM):
        most = f"CLAIM_MAX is {longest:.0f} s" if longest else f"{LONGEST_CLAIM:.0f} s at most"
        why = f"a claim for {request.seconds:.10g} s, {most}"
        raise Refusal(INVALID_REQUEST, why, "ask for a shorter one")
    seconds = request.seconds or longest
    record = record.copy(note=request.note, until=clock_boottime() + seconds if seconds else 0.0)
    want.check_held = partial(refuse_other_claim, node, record, want)
    grant = claim_devices(node, record, want, partial(judge, node), deadline)
    if grant.fresh:
        grants.note_owed_line(node.settings.state_dir, node.store, grant.owner)
    return grant


def describe_former_claim(grant: Grant) -> str:
    """Return that a process had what it claims, and until when; nothing of a fresh claim."""
    if grant.fresh:
        return ""
    labels = ", ".join(dict.fromkeys([device.label() for device in grant.devices]))
    end = f"until {claim_end(grant.owner)}" if grant.owner.until else "without an end"
    return f"pid {grant.owner.pid} holds GPU {labels} already, {end}: nothing of it is changed"


def claim_end(record: Owner) -> str:
    """Return when a claim ends that has an end: `11-29 18:00`."""
    at = time.time() + record.until - clock_boottime()
    return time.strftime("%m-%d %H:%M", time.localtime(at))
