# SPDX-License-Identifier: Apache-2.0
"""What a job was granted: the same answer to the same run, a share for its tasks, or a new start.

Hot. Everything here is done with the gate held.
"""

from gpulock.errors import BROKEN, BUSY, Refusal
from gpulock.node.context import Node
from gpulock.node.devices import Device
from gpulock.store.locks import Lock
from gpulock.store.owner import Owner

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from gpulock.alloc.liveness import Judge


class ClaimRequest:
    """What is asked for: `count` devices, of `wanted` ids alone where there are some.

    `join`: a task may share what its job holds here already. `check` refuses what was chosen.
    `last` are ids that are taken only where there are not enough others.
    """

    __slots__ = ("check", "count", "join", "last", "wanted")

    def __init__(
        self,
        count: int,
        wanted: tuple[str, ...],
        join: bool,
        check: "Callable[[list[Device]], object]",
        last: "frozenset[str]" = frozenset(),
    ) -> None:
        self.check = check
        self.last = last
        self.count = count
        self.wanted = wanted
        self.join = join


class Grant:
    """The devices of a job, by index, with the record that holds them.

    `fresh` is False when the same run asked again and got the same answer. `waited` is the time
    at the gate in seconds. `fault` is why STATE_DIR has no record of it, or nothing.
    """

    __slots__ = ("devices", "fault", "fresh", "owner", "waited")

    def __init__(self, granted: list[Device], record: Owner, fresh: bool, waited: float) -> None:
        self.devices = granted
        self.owner = record
        self.fresh = fresh
        self.waited = waited
        self.fault = ""


def is_same_job(record: Owner, template: Owner) -> bool:
    """Return whether a record is of the job that asks: not of another user who got its id again,
    nor of a later run.
    """
    if record.key() != template.key():
        return False
    other = record.uid != template.uid or record.restart > template.restart
    return not (record.scheduler == "slurm" and other)


def same_run_grant(
    mine: list[Lock], template: Owner, count: int, found: list[Device]
) -> Grant | None:
    """Return the grant this very run has already, if it is whole and not being released.

    Never a Slurm job's: its Prolog runs once, and a second one of the same id may be of a job
    that got the id again, or was started again without an Epilog.
    """
    record = mine[0].owner
    assert record is not None
    if record.scheduler == "slurm":
        return None
    granted = whole_grant(mine, found)
    same = (record.uid, record.run(), record.boot_id, record.draining) == (
        template.uid,
        template.run(),
        template.boot_id,
        0,
    )
    return Grant(granted, record, False, 0.0) if len(granted) == count and same else None


def whole_grant(mine: list[Lock], found: list[Device]) -> list[Device]:
    """Return the devices of a grant that is whole: one token, every device locked and there."""
    record = mine[0].owner
    assert record is not None
    ids = {lock.id for lock in mine if lock.owner and lock.owner.token == record.token}
    granted = [d for d in found if d.id in ids]
    whole = ids == set(record.devices) and len(ids) == len(mine) == len(granted)
    return granted if whole else []


def join_grant(
    node: Node, mine: list[Lock], template: Owner, found: list[Device], judge: "Judge"
) -> Grant | None:
    """Let a task share what its job holds here, while that job lives: its shepherd is an anchor.

    None where there is no whole, living grant.
    """
    record = mine[0].owner
    assert record is not None
    granted = whole_grant(mine, found)
    if not granted or record.uid != template.uid or record.draining:
        return None
    for lock in mine:
        node.store.read_details(lock)
        if judge.verdict(lock).state != "alive":
            return None
    try:
        for lock in mine:
            node.store.anchor(lock.id, template.pid, template.start, template.add_grp_id)
            drop_ended_anchors(node, lock, template.add_grp_id)
    except OSError as fault:
        raise Refusal(BROKEN, f"a lock cannot be joined: {fault}", "look at LOCK_DIR") from fault
    return Grant(granted, record, False, 0.0)


def drop_ended_anchors(node: Node, lock: Lock, gid: int) -> None:
    """Forget anchors of tasks that are over, where a later one names their group.

    A job may start thousands of short tasks, one after the other; execd gives them the same few
    groups again and again. What is in the cgroup of one that is over is found by its anchor alone.
    """
    if node.settings.isolation == "cgroup":
        return
    over: list[tuple[int, int, int]] = []
    named = {gid}
    for anchor in lock.anchors:
        try:
            running = node.proc.running(*anchor[:2])
        except (OSError, ValueError):
            running = True
        if running:
            named.add(anchor[2])
        else:
            over.append(anchor)
    for pid, start, group in over:
        if group in named:
            node.store.drop_anchor(lock.id, pid, start)
        named.add(group)


def release_previous_run(
    node: Node, mine: list[Lock], template: Owner, found: list[Device], judge: "Judge"
) -> None:
    """Free what an earlier run of the job, or a cut-short claim of this one, left; or refuse."""
    from gpulock.alloc import reaper

    held = node.store.read_all_locks()
    judge.attach_step_daemons(held)
    engine = reaper.Reaper(node, judge, found, held)
    for lock in mine:
        record = lock.owner
        assert record is not None
        node.store.read_details(lock)
        own = record.run() == template.run() or record.scheduler == "slurm"
        if own and record.boot_id == template.boot_id:
            how = "claim: this run's claim was cut short"
            outcome = engine.finish(lock, reaper.CUT_SHORT, how)
        else:
            outcome = engine.finish(lock, reaper.DIED)
        if outcome.act != reaper.FREED:
            raise Refusal(
                BROKEN if outcome.fault else BUSY,
                f"{lock.id} is still held by an earlier run: {outcome.reason}",
                f"see gpulock why {lock.id}",
            )
