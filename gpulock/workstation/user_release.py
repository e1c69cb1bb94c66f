# SPDX-License-Identifier: Apache-2.0
"""Give devices back for an ordinary user: what their own process holds and no process uses.

Under the gate, and by the token that was judged. There is no --force here: that is root's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from gpulock.alloc.process_owner import is_command_running_elsewhere
from gpulock.alloc.process_scan import ProcessScan
from gpulock.alloc.reaper import Reaper
from gpulock.alloc.release import is_same_claim
from gpulock.deadline import Deadline
from gpulock.errors import BUSY, INVALID_REQUEST, Refusal
from gpulock.node.context import Node
from gpulock.node.devices import lock_ids_overlap
from gpulock.schedulers.liveness import make_liveness_judge
from gpulock.store.gate import Gate
from gpulock.store.locks import Lock
from gpulock.store.owner import Owner
from gpulock.workstation.peer import Peer
from gpulock.workstation.wire import SocketRequest

LOOK_SECONDS = 2.0  # at the open files of a user, while gpulockd serves nobody else


def release_for_user(
    node: Node, peer: Peer, request: SocketRequest, deadline: Deadline
) -> tuple[str, ...]:
    """Free what is meant, all or none; return the ids. Raises Refusal."""
    caller = peer.account, peer.pid
    return release_unused(node, lambda one: lock_matches_request(one, request), caller, deadline)


def release_ended_claim(node: Node, record: Owner, deadline: Deadline) -> None:
    """Free a claim whose end has come, as its user would; raise Refusal."""

    def meant(lock: Lock) -> bool:
        return lock.owner is not None and lock.owner.token == record.token

    release_unused(node, meant, (record.uid, 0), deadline)


def release_unused(
    node: Node, meant: Callable[[Lock], bool], caller: tuple[int, int], deadline: Deadline
) -> tuple[str, ...]:
    """Free the locks that are meant, all or none, for a caller (uid, pid); raise Refusal."""
    uid, pid = caller
    judge = make_liveness_judge(node)
    seen = node.store.read_all_locks()
    # a look at all files is not for what means nothing, or is refused without it
    refuse_running_commands(select_own_locks(seen, meant, uid), pid, judge.scan)
    reaper = Reaper(node, judge, node.devices_if_driver(), {})
    reaper.files.seconds = LOOK_SECONDS
    reaper.files.look(uid)
    with Gate(node.store, deadline):
        reaper.read_locks()
        # what was claimed since has not been looked at
        same = {n: one for n, one in reaper.held.items() if is_same_claim(seen.get(n), one)}
        locks = select_own_locks(same, meant, uid)
        refuse_running_commands(locks, pid, judge.scan)
        reaper.give_back(locks, f"released by uid {uid}" if pid else "its end has come")
    return tuple(lock.id for lock in locks)


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
        record = lock.owner
        if record is None or record.scheduler != "process" or record.uid != uid:
            raise Refusal(INVALID_REQUEST, f"{lock.id} is not yours", "ask its owner, or root")
    return locks


def lock_matches_request(lock: Lock, request: SocketRequest) -> bool:
    """Return whether a request names a lock: by its device, or by who holds it."""
    if request.devices:
        return any(lock_ids_overlap(lock.id, name) for name in request.devices)
    record = lock.owner
    return record is not None and (record.scheduler, record.pid, record.start) == (
        "process",
        request.pid,
        request.start,
    )
