# SPDX-License-Identifier: Apache-2.0
"""Give devices back for their owner: what a process of that user holds and no process uses.

Under the gate, and by the token that was judged. There is no --force here: that is root's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from gpulock.alloc.process_owner import is_command_running_elsewhere
from gpulock.alloc.process_scan import ProcessScan
from gpulock.alloc.reaper import GIVEN_BACK, Reaper
from gpulock.alloc.release import is_same_claim, restrict_to_owners
from gpulock.deadline import Deadline
from gpulock.errors import BUSY, INVALID_REQUEST, Refusal
from gpulock.node.context import Node
from gpulock.node.devices import lock_ids_overlap
from gpulock.schedulers.liveness import make_liveness_judge
from gpulock.store.gate import Gate
from gpulock.store.locks import Lock
from gpulock.workstation.peer import Peer
from gpulock.workstation.wire import SocketRequest

if TYPE_CHECKING:
    from gpulock.alloc.reaper import ClaimEnd


def release_for_user(
    node: Node, peer: Peer, request: SocketRequest, deadline: Deadline
) -> tuple[str, ...]:
    """Free what is meant, all or none; return the ids. Raises Refusal."""
    caller, how = (peer.account, peer.pid), f"released by uid {peer.account}"
    holder = ("process", request.pid, request.start)

    def meant(lock: Lock) -> bool:
        if request.devices:
            return any(lock_ids_overlap(lock.id, name) for name in request.devices)
        record = lock.owner
        return record is not None and (record.scheduler, record.pid, record.start) == holder

    return tuple(lock.id for lock in release_unused(node, meant, caller, deadline, how))


def release_unused(
    node: Node,
    meant: Callable[[Lock], bool],
    caller: tuple[int, int],
    deadline: Deadline,
    how: str,
    over: ClaimEnd = GIVEN_BACK,
) -> list[Lock]:
    """Free the locks that are meant, all or none, for a caller (uid, pid); raise Refusal."""
    uid, pid = caller
    judge = make_liveness_judge(node)
    seen = node.store.read_all_locks()
    # a look at all files is not for what means nothing, or is refused without it
    own = select_own_locks(seen, meant, uid)
    refuse_running_commands(own, pid, judge.scan)  # once: a command that ended stays so
    restrict_to_owners(judge.scan, own)
    reaper = Reaper(node, judge, node.devices_if_driver(), seen)
    reaper.decide(own, over)
    judge.scan.scan_closed = True
    with Gate(node.store, deadline):
        reaper.read_locks()
        # what was claimed since has not been looked at
        same = {n: one for n, one in reaper.held.items() if is_same_claim(seen.get(n), one)}
        locks = select_own_locks(same, meant, uid)
        reaper.give_back(locks, how, over)
    return locks


def refuse_running_commands(locks: Iterable[Lock], pid: int, scan: ProcessScan) -> None:
    """Raise Refusal for a lock of a command that runs, unless the command itself asks."""
    for lock in locks:
        if lock.owner and is_command_running_elsewhere(lock.owner, pid, scan):
            what = f"held by running process {lock.owner.pid}; release it from there"
            raise Refusal(BUSY, what, "or end it")


def select_own_locks(held: dict[str, Lock], meant: Callable[[Lock], bool], uid: int) -> list[Lock]:
    """Return the locks that are meant, all of them claims of user `uid`; raise Refusal."""
    locks = [lock for lock in held.values() if meant(lock)]
    if not locks:
        raise Refusal(INVALID_REQUEST, "no matching claim", "see gpulock status")
    for lock in locks:
        record, do = lock.owner, "ask its user, or root"
        if record is None or lock.fault:
            why = lock.fault or "a claim is being made"
            raise Refusal(INVALID_REQUEST, f"{lock.id}: {why}", "ask root")
        if record.scheduler == "process" and record.uid == uid:
            continue
        who = record.job() if record.scheduler == "process" else f"job {record.job()}"
        if record.scheduler == "admin":
            who, do = "a reserve", f"gpulock unreserve {lock.id}"
        raise Refusal(INVALID_REQUEST, f"{lock.id} is held by {who} of {record.user}", do)
    return locks
